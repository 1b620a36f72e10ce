"""Who guesses the tokens that follow. No torch is needed to guess from tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import Sequence

NUM_KINDS = 32  # of evidence


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence, and what speaks for each: a number below NUM_KINDS that means something to
    their proposer alone. How often the tokens of a kind are right is learnt."""

    tokens: Seq[int]
    kinds: Seq[int]


NOTHING = Proposal((), ())


class Proposer(Protocol):
    """One way to guess. Owned by the step thread. Whatever it says, no answer changes: what is wrong costs time."""

    def propose(self, sequences: Seq[Sequence], max_tokens: int, /) -> list[Proposal]:
        """What may follow the tokens of each, the next one first: at most so many. It may be nothing. A function of the
        sequences' tokens and of what was finished before; only looks at the sequences."""
        ...

    def finished(self, sequence: Sequence, /) -> None:
        """It has its last token."""
        ...
