"""The tokens of every sequence that drafts are made for, indexed once, whoever asks."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from engine.scheduler.sequence import Sequence
from engine.spec_decode.token_index import TokenIndex


class Histories:
    """Owned by the step thread. A sequence that is gone is forgotten."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Sequence, TokenIndex] = WeakKeyDictionary()

    def of(self, sequence: Sequence) -> TokenIndex:
        """Prompt and answer."""
        index = self._of.get(sequence)
        if index is None:
            index = self._of[sequence] = TokenIndex(sequence.tokens)
        return index
