"""Drafts before every step, whatever their cost and acceptance rate. Otherwise heads with random weights are soon
disabled.

await cluster.add(Role.DECODE, prepare=draft_always)    # where ranks have processes of their own
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import Computing, Proposal
from engine.spec_decode.speculation import Speculation
from engine.timing.pace import Pace


class AskedAlways:
    """Proposer that drafts for every row of every step."""

    def __init__(self, computing: Computing) -> None:
        self._computing = computing

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        return self._computing.propose(sequences, max_tokens)

    def finished(self, sequence: Sequence) -> None:
        self._computing.finished(sequence)
        self._computing.forget(sequence)


def draft_always() -> None:
    """Install the proposer in this process for all engines created later."""
    of_method = Speculation.of

    def of(method: str, *, computing: Mapping[str, Computing], max_tokens: int, vocab_size: int, **more: Any) -> Any:
        sizes: dict[str, Any] = {"max_tokens": max_tokens, "vocab_size": vocab_size}
        if not computing:
            return of_method(method, **sizes, **more, may_pass_over=False)
        proposers = {name: AskedAlways(one) for name, one in computing.items()}
        return Speculation(proposers, **sizes, may_pass_over=False)

    for owner, name, value in ((Pace, "timing", None), (Speculation, "of", of)):
        setattr(owner, name, value)
