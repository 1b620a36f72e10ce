"""Traffic of the last minutes, as reported by the routers."""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_hex
from time import monotonic

from core.trace.traffic import KEPT_S, ReplicaReport, SeenRequest, TrafficReport

_MAX_REQUESTS = 100_000
_MAX_IDS = 4_000_000
# Age limit of a router's report about replicas.
_FRESH_S = 30.0


class TrafficLog:
    """Bounded log of recent requests, on the controller's event loop.

    A restarted controller has a new `life`, on which routers resend all that they remember.
    """

    def __init__(self, *, now: Callable[[], float] = monotonic) -> None:
        self.life = token_hex(8)
        # Called once for each finished request.
        self.ended: Callable[[SeenRequest], None] = lambda seen: None
        self._now = now
        self._requests: dict[tuple[str, int], SeenRequest] = {}
        self._num_ids = 0
        # Last report of each router, with its time of arrival.
        self._reports: dict[str, tuple[float, TrafficReport]] = {}

    def note(self, report: TrafficReport) -> str:
        """Merge a router's report. Returns our `life`."""
        now = self._now()
        for number, seen in {**report.arrived, **report.changed}.items():
            key = (report.router, number)
            seen.arrival_s = now - seen.arrival_s
            before = self._requests.get(key)
            if before is None:
                self._num_ids += len(seen.ids or ())
            else:
                # A repeated report may arrive a little later; keep the first time.
                seen.arrival_s = before.arrival_s
            self._requests[key] = seen
            if seen.is_over and not (before and before.is_over):
                self.ended(seen)
        self._reports[report.router] = (now, report)
        self._forget(now)
        return self.life

    def recent(self) -> list[SeenRequest]:
        """Return requests in order of arrival, by time.monotonic() of this process."""
        self._forget(self._now())
        return sorted(self._requests.values(), key=lambda seen: seen.arrival_s)

    @property
    def replicas(self) -> list[ReplicaReport]:
        """Replicas as seen by the router that reported last."""
        fresh = self._fresh()
        return list(fresh[-1].replicas) if fresh else []

    @property
    def num_waiting(self) -> int:
        return sum(report.num_waiting for report in self._fresh())

    def _fresh(self) -> list[TrafficReport]:
        now = self._now()
        reports = sorted(self._reports.values(), key=lambda one: one[0])
        return [report for when, report in reports if now - when <= _FRESH_S]

    def _forget(self, now: float) -> None:
        is_full = len(self._requests) > _MAX_REQUESTS or self._num_ids > _MAX_IDS
        oldest = min((seen.arrival_s for seen in self._requests.values()), default=now)
        if not is_full and now - oldest <= KEPT_S:
            return
        in_order = sorted(self._requests.items(), key=lambda item: item[1].arrival_s)
        for key, first in in_order:
            is_full = len(self._requests) > _MAX_REQUESTS or self._num_ids > _MAX_IDS
            if not is_full and now - first.arrival_s <= KEPT_S:
                break
            del self._requests[key]
            self._num_ids -= len(first.ids or ())
        self._reports = {router: one for router, one in self._reports.items() if now - one[0] <= KEPT_S}
