"""Engine environment without a model: every token is 0, and transfers complete when the test says so."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sampling.params import Sampled, SamplingRow
from engine.scheduler.prompts import Prompt
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders


class FakeModel:
    """Implements engine.scheduler.step.Runner."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int]] = []

    def execute(self, step: ScheduledStep | None, orders: Orders, /) -> str | None:
        self.copies += orders.copies
        return "logits" if step else None


class FakeConnector:
    """Implements engine.scheduler.step.KVConnector."""

    def __init__(self) -> None:
        self.admitted: list[Prompt] = []

    def begin_step(self, admitted: Sequence[Prompt]) -> None:
        self.admitted = list(admitted)

    def orders(self, step: ScheduledStep) -> Orders:
        return Orders()


def choose_zero(logits: str, rows: Sequence[SamplingRow], positions: Sequence[int] | None, /) -> Sampled:
    return Sampled.known([(0, None) for _ in rows])
