"""Capture for devices without graphs."""

from __future__ import annotations

from engine.runner.decode_graphs import Step


class FakeReplays:
    """Capture that runs the step again, and counts the replays."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, step: Step) -> Step:
        step()

        def replay() -> None:
            self.num_replays += 1
            step()

        return replay
