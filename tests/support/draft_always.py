"""Drafts before every step, whatever they cost and however seldom they are right: without this, heads with random
weights are soon not asked any more.

await cluster.add(Role.DECODE, prepare=draft_always)    # where ranks have processes of their own
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import ModelProposer, Proposal
from engine.spec_decode.speculation import Speculation
from engine.timing.pace import Pace


class AskedAlways:
    """Implements Proposer by who computes drafts, for every row of every step."""

    def __init__(self, model: ModelProposer) -> None:
        self._model = model

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        return self._model.propose(sequences, max_tokens)

    def finished(self, sequence: Sequence) -> None:
        self._model.finished(sequence)
        self._model.forget(sequence)


def draft_always() -> None:
    """In this process, for all that is made from now on."""
    of_method = Speculation.of

    def of(method: str, *, models: Mapping[str, ModelProposer], max_tokens: int, vocab_size: int, **more: Any) -> Any:
        sizes: dict[str, Any] = {"max_tokens": max_tokens, "vocab_size": vocab_size}
        if not models:
            return of_method(method, **sizes, **more, backs_off=False)
        asked = {name: AskedAlways(one) for name, one in models.items()}
        return Speculation(asked, **sizes, backs_off=False)

    for owner, name, value in ((Pace, "timing", None), (Speculation, "of", of)):
        setattr(owner, name, value)
