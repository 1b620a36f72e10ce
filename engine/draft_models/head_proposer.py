"""Drafts by heads on the model's own hidden states: from what the last step has left of each row."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol

from engine.draft_models.drawn import DrawnTokens
from engine.heads.head_row import Choose, HeadLogits, HeadRow
from engine.sequence import Sequence
from engine.speculation.proposer import NOTHING, Proposal


class AskedHeads(Protocol):
    """Heads, and what they remember: a rank that is alone."""

    def knows(self, rows: Seq[HeadRow], /) -> bool: ...

    def draft(self, rows: Seq[HeadRow], max_tokens: int, choose: Choose, /) -> None: ...


class HeadProposer:
    """Implements Computing. Nothing is ever to be caught up with: what heads need of a sequence, its steps have left,
    or what came with its KV. Tokens are drawn as the sequence's own will be."""

    def __init__(self, heads: AskedHeads, drawn: DrawnTokens | None = None) -> None:
        """drawn: None, with what it will learn itself."""
        self._heads = heads
        self._drawn = drawn or DrawnTokens()

    def num_behind(self, sequence: Sequence) -> int | None:
        return 0 if _decodes(sequence) and self._heads.knows([_row(sequence)]) else None

    def catch_up(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        drafts = [_Draft(sequence) for sequence in sequences]
        asked = [draft for draft in drafts if _decodes(draft.sequence)]
        if asked and max_tokens > 0:
            self._heads.draft([_row(draft.sequence) for draft in asked], max_tokens, partial(self._choose, asked))
        return [Proposal(draft.tokens, draft.kinds) if draft.tokens else NOTHING for draft in drafts]

    def forget(self, sequence: Sequence) -> None:
        pass

    def finished(self, sequence: Sequence) -> None:
        pass

    def _choose(self, asked: Seq[_Draft], logits: HeadLogits, rows: Seq[int], place: int) -> list[int]:
        drafts = [asked[row] for row in rows]
        drawn = self._drawn.draw(logits.values_RD, [draft.sequence for draft in drafts], place, ids_V=logits.ids_D)
        return [draft.take(token) for draft, token in zip(drafts, drawn, strict=True)]


class _Draft:
    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.tokens: list[int] = []
        self.kinds: list[int] = []
        self._is_over = False

    def take(self, token: tuple[int, int] | None) -> int:
        """The next one, and its kind; None: there is none, and none follows. Returns any that there is."""
        self._is_over |= token is None
        if token is None or self._is_over:
            return 0
        self.tokens.append(token[0])
        self.kinds.append(token[1])
        return token[0]


def _decodes(sequence: Sequence) -> bool:
    """It lacks its last token's KV alone, and nothing of it is coming."""
    is_next_to_last = sequence.num_computed == len(sequence.tokens) - 1 > 0
    return is_next_to_last and bool(sequence.blocks) and not sequence.num_coming


def _row(sequence: Sequence) -> HeadRow:
    return HeadRow(sequence.tokens[-1], len(sequence.tokens) - 1, sequence.blocks)
