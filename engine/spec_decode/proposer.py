"""Who guesses the tokens that follow. No torch is needed to guess from tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.scheduler.sequence import Sequence

NUM_KINDS = 48  # of evidence


class ProposedBranch(NamedTuple):
    """Tokens that may follow instead of those of a proposal, from one of them on."""

    place: int  # tokens of the proposal that are before it
    tokens: Seq[int]  # the first is not the proposal's own
    kinds: Seq[int]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence, and what speaks for each: a number below NUM_KINDS that means something to
    their proposer alone. How often the tokens of a kind are right is learnt, apart for those in branches."""

    tokens: Seq[int]
    kinds: Seq[int]
    branches: Seq[ProposedBranch] = ()


NOTHING = Proposal((), ())


class Proposer(Protocol):
    """One way to guess. Owned by the step thread. Whatever it says, no answer changes: what is wrong costs time.

    One that looks up is asked for every row of every step, but for those of which nothing was worth drafting lately:
    see Looks. One that computes is a `Computing`."""

    def propose(self, sequences: Seq[Sequence], max_tokens: int, /) -> list[Proposal]:
        """What may follow the tokens of each, the next one first: at most so many. It may be nothing. A function of the
        sequences' tokens and of what was finished before; only looks at the sequences."""
        ...

    def finished(self, sequence: Sequence, /) -> None:
        """It has its last token."""
        ...


class Computing(Proposer, Protocol):
    """A proposer to which asking costs time. It is asked for those rows for which that is expected to pay, and for as
    many tokens as pay: see Asking. What it keeps of a sequence is its own affair, and bounded: it may be asked about
    any sequence that runs, at any time, or never again."""

    def num_behind(self, sequence: Sequence, /) -> int | None:
        """Tokens that it has to compute of the sequence, as it is, before it can say what follows: 0 for one that need
        not. None: it cannot say anything of this one. Looks only."""
        ...

    def catch_up(self, sequence: Sequence, num_tokens: int, /) -> None:
        """Compute at most so many of these, and guess nothing."""
        ...

    def rest(self, num_first: int | None, /) -> None:
        """It has not been worth asking for a while: until it is told again, it is asked at most within so many first
        tokens of answers, perhaps none. None: it is worth it. Who gathers in every step what it may be asked about need
        not gather more, and has nothing to say of what it has missed."""
        ...

    def forget(self, sequence: Sequence, /) -> None:
        """It gets no more tokens here, or none for now: what is kept for it may go. It may never have been asked
        about."""
        ...
