"""KV traffic between replicas in the last seconds, for the requests of one router."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from time import monotonic

_LATELY_S = 5.0
_MAX_TRANSFERS = 8192


@dataclass(frozen=True, slots=True)
class Flow:
    """KV traffic of one kind from one replica to another."""

    kind: str  # "handoff", "pull" or "move"
    source: str
    target: str
    bytes_per_s: float


class Flows:
    """Log of recent KV transfers. Lives on the event loop."""

    def __init__(self) -> None:
        self._transfers: deque[tuple[float, str, str, str, int]] = deque(maxlen=_MAX_TRANSFERS)

    def add(self, kind: str, source: str, target: str, num_bytes: int) -> None:
        self._transfers.append((monotonic(), kind, source, target, num_bytes))

    def lately(self) -> list[Flow]:
        """Return the flows of the last _LATELY_S seconds, largest first."""
        since = monotonic() - _LATELY_S
        while self._transfers and self._transfers[0][0] < since:
            self._transfers.popleft()
        sums: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        for _, kind, source, target, num_bytes in self._transfers:
            sums[kind, source, target] += num_bytes
        flows = [Flow(*between, num_bytes / _LATELY_S) for between, num_bytes in sums.items()]
        return sorted(flows, key=lambda flow: -flow.bytes_per_s)
