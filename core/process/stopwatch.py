"""Timing of the phases of a long procedure."""

from __future__ import annotations

import time


class Stopwatch:
    """Consecutive laps. Laps of the same name are added up."""

    def __init__(self) -> None:
        self.laps_s: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        """End the current lap and add it to `name`."""
        now = time.monotonic()
        self.laps_s[name] = self.laps_s.get(name, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return " · ".join(f"{name} {seconds:.1f} s" for name, seconds in self.laps_s.items())
