"""Traffic reports of a router: complete for a new controller, then incremental."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from core.process.supervisor import Supervisor
from core.trace.traffic import ShownDecision, TrafficAnswer, TrafficReport
from core.types.errors import DeployError
from router.serving.replicas import Replicas
from router.serving.worker import Worker
from router.telemetry.traffic import TrafficRecord, TrafficReporter
from tests.router.serving.virtual_time import VirtualTimeLoop

_LIVES = ["a", "a", "", "a", "b", "b"]  # `life` in each reply; empty: the call fails


def test_a_restarted_controller_gets_one_full_report() -> None:
    sizes: list[int] = []
    shown: list[Sequence[ShownDecision]] = []

    async def run() -> None:
        record = TrafficRecord(b"k" * 32, router="r")
        over = asyncio.Event()

        async def send(report: TrafficReport) -> TrafficAnswer:
            sizes.append(len(report.arrived))
            life = _LIVES[len(sizes) - 1]
            if len(sizes) == len(_LIVES):
                over.set()
            if not life:
                raise DeployError("the controller starts")
            decision = ShownDecision(at=0.0, text="1P1D -> 2P1D", reason="queue grows")
            return TrafficAnswer(life=life, scaling=(decision,))

        for _ in range(3):
            record.arrived([1, 2, 3], salt="", num_choices=1, ttft_s=lambda: 0.0)
        reporter = TrafficReporter(record, _replicas(), num_waiting=lambda: 0, answered=shown.append)
        task = asyncio.create_task(reporter.report_forever(send))
        await over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run())
    # full, no changes, failed, full again, no changes (the reply shows a new life), full again
    assert sizes == [3, 0, 0, 3, 0, 3]
    assert [decisions[0].text for decisions in shown] == ["1P1D -> 2P1D"] * 5


def _replicas() -> Replicas:
    def connect(member: object) -> Worker:
        raise AssertionError("no replica may be connected")

    return Replicas(connect, tasks=Supervisor())
