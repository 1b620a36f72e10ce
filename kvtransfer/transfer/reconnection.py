"""How long a new link to a rank waits before it connects: a little longer each time that nobody was found there."""

from __future__ import annotations

_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 1.0


class Reconnection:
    """One rank's links to one address, one after the other. From any thread: only one link at a time changes it."""

    def __init__(self) -> None:
        self._num_failures = 0  # in a row

    @property
    def delay_s(self) -> float:
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (self._num_failures - 1)) if self._num_failures else 0.0

    def succeeded(self) -> None:
        """The link was let in."""
        self._num_failures = 0

    def failed(self) -> None:
        """The link has ended, let in or not."""
        self._num_failures += 1
