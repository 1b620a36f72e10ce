"""Drafts before every step, whatever their cost and acceptance rate. Otherwise heads with random weights are soon
disabled.

await cluster.add(Role.DECODE, prepare=draft_always)    # where ranks run in separate processes
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import ModelProposer, Proposal
from engine.spec_decode.speculation import Speculation
from engine.timing.pace import Pace


class AlwaysProposer:
    """Proposer that drafts for every row of every step."""

    def __init__(self, model: ModelProposer) -> None:
        self._model = model

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        return self._model.propose(sequences, max_tokens)

    def finished(self, sequence: Sequence) -> None:
        self._model.forget(sequence)


def draft_always() -> None:
    """Install the proposer in this process for all engines created later."""
    of_method = Speculation.of

    def of(method: str, *, models: Mapping[str, ModelProposer], max_tokens: int, vocab_size: int, **more: Any) -> Any:
        sizes: dict[str, Any] = {"max_tokens": max_tokens, "vocab_size": vocab_size}
        if not models:
            return of_method(method, **sizes, **more, backs_off=False)
        proposers = {name: AlwaysProposer(one) for name, one in models.items()}
        return Speculation(proposers, **sizes, backs_off=False)

    for owner, name, value in ((Pace, "timing", None), (Speculation, "of", of)):
        setattr(owner, name, value)
