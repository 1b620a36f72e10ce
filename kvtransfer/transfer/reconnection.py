"""Exponential backoff before a new link connects to a rank."""

from __future__ import annotations

_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 1.0


class Reconnection:
    """Backoff state for one address. Thread-safe, because one link at a time changes it."""

    def __init__(self) -> None:
        self._num_failures = 0  # in a row

    @property
    def delay_s(self) -> float:
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (self._num_failures - 1)) if self._num_failures else 0.0

    def succeeded(self) -> None:
        """Reset the delay after the peer has accepted the link."""
        self._num_failures = 0

    def failed(self) -> None:
        """Increase the delay after a link has ended, accepted or not."""
        self._num_failures += 1
