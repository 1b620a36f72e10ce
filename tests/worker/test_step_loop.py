"""Step loop: heartbeats under a flood of commands."""

from __future__ import annotations

import threading

from tests.support.waiting import WITHIN_S
from worker.step_loop import StepLoop


def test_idle_loop_sends_heartbeats_under_a_flood_of_commands() -> None:
    idle = threading.Event()

    def step() -> bool:
        loop.post(lambda: None)  # so that a command is always pending
        return False

    loop = StepLoop(step=step, idle=idle.set, idle_s=0.01, ended=lambda: None)
    loop.start()
    assert idle.wait(WITHIN_S)
    loop.stop(lambda: None, timeout_s=WITHIN_S)
    loop.run()
