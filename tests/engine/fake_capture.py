"""Recorded steps on a device whose streams are in no order but what marks say."""

from __future__ import annotations

from engine.runner.decode_graphs import Step
from tests.support.fake_streams import FakeStreams


class FakeCapture:
    """Does as CudaCapture does, on a stream of its own, but launches a step anew instead of a graph."""

    def __init__(self, device: FakeStreams, *, replays_on: str | None = None, waits: bool = True) -> None:
        """replays_on: another stream than the one that replays. waits: for what the step reads."""
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
