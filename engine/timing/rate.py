"""Running rate of recent measurements."""

from __future__ import annotations

_KEEP = 0.8  # weight of the past at each new measurement: about the last five count


class Rate:
    """Amount per second over recent measurements, each weighted by its own duration."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * _KEEP + amount
        self._seconds = self._seconds * _KEEP + seconds

    @property
    def per_s(self) -> float:
        """Rate of recent measurements; 0 before the first one."""
        return self._amount / self._seconds if self._seconds else 0.0
