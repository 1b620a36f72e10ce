"""StepEvent on a GPU."""

from __future__ import annotations

import torch


class DeviceEvent:
    """Implements engine.timing.pace.StepEvent on the current CUDA stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    @property
    def is_past(self) -> bool:
        return bool(self._event.query())

    def seconds_since(self, earlier: DeviceEvent) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3
