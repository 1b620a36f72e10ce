"""Interfaces of proposers: the code that proposes draft tokens. Importing them needs no torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from engine.scheduler.sequence import Sequence

NUM_KINDS = 48


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow a sequence.

    kinds: evidence for each token, a number below NUM_KINDS whose meaning the proposer defines. The acceptance rate is
    learned by kind.
    """

    tokens: Seq[int]
    kinds: Seq[int]


NO_PROPOSAL = Proposal((), ())


class Proposer(Protocol):
    """One way to propose tokens. Owned by the step thread. A proposal never changes an answer; a wrong one costs time.

    A proposer of this kind is cheap and called for every row, except for rows under backoff.
    """

    def propose(self, sequences: Seq[Sequence], max_tokens: int, /) -> list[Proposal]:
        """Return for each sequence up to max_tokens tokens, the next one first; possibly none.

        Depends only on the sequences' tokens and on earlier finished answers. Does not change the sequences.
        """
        ...

    def finished(self, sequence: Sequence, /) -> None:
        """Note that the sequence has its last token."""
        ...


class ModelProposer(Protocol):
    """A proposer whose calls run a model. DraftScheduler decides when to call it, for which rows and tokens.

    Bound the state per sequence: calls for a running sequence may come at any time, or never again.
    """

    def propose(self, sequences: Seq[Sequence], max_tokens: int, /) -> list[Proposal]:
        """See Proposer. max_tokens: at least 1."""
        ...

    def num_behind(self, sequence: Sequence, /) -> int | None:
        """Return the number of tokens to compute before a proposal; None if none is possible. Changes nothing."""
        ...

    def catch_up(self, sequence: Sequence, num_tokens: int, /) -> None:
        """Compute up to num_tokens of the missing tokens, and propose nothing."""
        return None

    def rest(self, num_first: int | None, /) -> None:
        """Announce that until the next call only the first num_first tokens of answers (perhaps 0) are of interest.

        None: all tokens are. A proposer that collects state in every step may skip the other tokens, and then returns
        None from num_behind for sequences it has missed.
        """
        return None

    def forget(self, sequence: Sequence, /) -> None:
        """Free the state of a sequence that ended or paused here."""
        return None
