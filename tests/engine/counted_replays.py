"""Recorded steps where nothing records."""

from __future__ import annotations

from engine.runner.decode_graphs import Step


class FakeReplays:
    """Implements Capture: computes a step again, and counts how often."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, step: Step) -> Step:
        step()

        def replay() -> None:
            self.num_replays += 1
            step()

        return replay
