"""Captures for devices without graphs."""

from __future__ import annotations

from engine.runner.decode_graphs import Step
from tests.support.fake_streams import FakeStreams


class FakeCapture:
    """Like CudaCapture on its own stream of a device ordered by events only, but runs the step instead of a graph."""

    def __init__(self, device: FakeStreams, *, replays_on: str | None = None, waits: bool = True) -> None:
        """replays_on: stream of the replay, if it is another one. waits: for the memory that the step reads."""
        self._device = device
        self._lane = device.device_stream()
        self._replays_on = replays_on
        self._waits = waits

    def __call__(self, step: Step) -> Step:
        begun = self._device.mark()
        with self._lane.entered():
            if self._waits:
                begun.hold_up()
            step()
            recorded = self._device.mark()
        recorded.hold_up()

        def replay() -> None:
            with self._device.watched(self._replays_on or self._device.current):
                step()

        return replay


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
