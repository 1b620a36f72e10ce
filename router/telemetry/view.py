"""Snapshot of a deployment as one router sees it, in plain values, for `cluster top`, with the last minutes' rates.

Request ids and tenants come from clients: escape them before display.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from prometheus_client.core import Metric

from core.rpc import worker_pb2 as pb
from core.types.request import Role
from core.types.step_timing import StepTiming
from core.wire.messages import from_message
from router.routing.decisions import Decisions
from router.serving.replicas import Replica
from router.telemetry.metrics import Metrics
from router.telemetry.traffic import Flows

_TAKE_S = 1.0
_MAX_REPLICAS = 256  # replicas listed individually
_MAX_FLOWS = 128
_MAX_DECISIONS = 12
_MAX_EVENTS = 50
_MAX_POINTS = 300

AutoscalerLog = Callable[[], Sequence[Mapping[str, Any]]]


class RouterView:
    """View of the deployment, updated every second by `run`. Lives on the event loop."""

    def __init__(
        self,
        *,
        deployment: str,
        router: str,
        replicas: Iterable[Replica],
        metrics: Metrics,
        decisions: Decisions,
        flows: Flows,
        routers: Callable[[], Mapping[str, str]] = dict,
        autoscaler: AutoscalerLog = tuple,
    ) -> None:
        """replicas: iterated again at each update. routers: returns the admin address of each router.
        autoscaler: returns its last decisions, newest first, each with `at` (unix seconds), `text` and `reason`."""
        self._names = {"deployment": deployment, "router": router}
        self._replicas = replicas
        self._decisions = decisions
        self._flows = flows
        self._routers = routers
        self._autoscaler = autoscaler
        self._history = History(metrics)
        self._rates: dict[str, _Rate] = {}  # by replica
        self._states: dict[str, str] = {}
        self._has_lived: set[str] = set()
        self._events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)

    async def run(self) -> None:
        """Update the view every second until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(_TAKE_S)

    def take(self) -> None:
        """Record the current second: rates, states and state changes."""
        self._history.take()
        states = {}
        for replica in self._replicas:
            self._rates.setdefault(replica.id, _Rate()).take(replica.status.totals)
            states[replica.id] = self._state(replica)
        for name in [name for name in self._rates if name not in states]:
            del self._rates[name]
        self._has_lived &= states.keys()
        for name in [*states, *(name for name in self._states if name not in states)]:
            before, now = self._states.get(name), states.get(name, "gone")
            if before != now and (before or self._states or now != "ready"):
                self._events.appendleft({"at": time.time(), "replica": name, "text": "is " + now})
        self._states = states

    def now(self, *, has_history: bool = True) -> dict[str, Any]:
        """Return the snapshot. has_history: include the last minutes; else only their last second."""
        replicas = sorted(self._replicas, key=lambda replica: (self._state(replica) == "ready", _order(replica.id)))
        points = list(self._history.points)
        return {
            **self._names,
            "at": time.time(),
            "routers": dict(self._routers()),
            "replicas": [self._row(replica) for replica in replicas[:_MAX_REPLICAS]],
            "num_replicas": len(replicas),
            "flows": [asdict(flow) for flow in self._flows.lately()[:_MAX_FLOWS]],
            "history": [_point(point) for point in (points if has_history else points[-1:])],
            "decisions": self._decisions.last(_MAX_DECISIONS),
            "events": list(self._events),
            "autoscaler": [dict(one) for one in self._autoscaler()],
        }

    def _state(self, replica: Replica) -> str:
        if replica.is_alive:
            self._has_lived.add(replica.id)
            return "draining" if replica.status.draining else "ready"
        return "lost" if replica.id in self._has_lived else "joining"

    def _row(self, replica: Replica) -> dict[str, Any]:
        status, rate = replica.status, self._rates.get(replica.id) or _Rate()
        totals = status.totals
        return {
            "id": replica.id,
            "role": replica.member.role.value,
            "address": replica.member.address,
            "state": self._state(replica),
            "running": status.running,
            "waiting": status.waiting,
            "queued_tokens": status.queued_tokens,
            "max_running": replica.member.max_running,
            "blocks": status.blocks_total,
            "blocks_free": status.blocks_free,
            "blocks_cached": status.blocks_cached,
            "blocks_below": status.blocks_host + status.blocks_disk,
            "generated_per_s": rate.generated_per_s,
            "computed_per_s": rate.computed_per_s,
            "reused": _reused(replica),
            "link_bytes_per_s": status.link_bytes_per_s,
            "transfer_failures": totals.transfer_failures,
            "preemptions": totals.preemptions,
            "generated_tokens": totals.generated_tokens,
            "tokens_per_row": status.tokens_per_row,
            "timing": asdict(from_message(StepTiming, status.timing)) if status.HasField("timing") else None,
            "drafts": [
                {"method": one.method, "tokens": list(one.tokens), "accepted": list(one.accepted)}
                for one in totals.drafted
            ],
        }


def _reused(replica: Replica) -> float | None:
    """Return the fraction of prompt tokens that were cached; None for decode replicas, which report no such count."""
    totals = replica.status.totals
    is_known = replica.member.role is Role.PREFILL and totals.prompt_tokens
    return min(1.0, totals.prefix_hit_tokens / totals.prompt_tokens) if is_known else None


class _Rate:
    """Token rates of one replica."""

    def __init__(self) -> None:
        self.generated_per_s = self.computed_per_s = 0.0
        self._last: tuple[float, int, int] | None = None

    def take(self, totals: pb.Totals) -> None:
        now = (time.monotonic(), totals.generated_tokens, totals.computed_tokens)
        if self._last:
            seconds = max(now[0] - self._last[0], 1e-3)
            self.generated_per_s = max(0, now[1] - self._last[1]) / seconds
            self.computed_per_s = max(0, now[2] - self._last[2]) / seconds
        self._last = now


def _order(replica: str) -> tuple[str, int]:
    role, _, number = replica.rpartition("-")
    return (role, int(number)) if number.isdigit() else (replica, 0)


def _point(point: Point) -> dict[str, Any]:
    return asdict(point) | {"at": round(time.time() - (time.monotonic() - point.at), 1)}


@dataclass(frozen=True, slots=True)
class Point:
    """Rates and latencies of one second. Quantiles are None if nothing arrived in it."""

    at: float  # time.monotonic
    tokens_per_s: float
    requests_per_s: float
    ttft_s: tuple[float, float] | None  # P50, P99
    itl_s: tuple[float, float] | None
    waiting: int


class History:
    """History of one router. Lives on the event loop; `take` is called about once per second."""

    def __init__(self, metrics: Metrics) -> None:
        self.points: deque[Point] = deque(maxlen=_MAX_POINTS)
        self._metrics = metrics
        self._last = self._counted()

    def take(self) -> None:
        last, now = self._last, self._counted()
        self._last = now
        seconds = max(now.at - last.at, 1e-3)
        self.points.append(
            Point(
                at=now.at,
                tokens_per_s=(now.tokens - last.tokens) / seconds,
                requests_per_s=(now.requests - last.requests) / seconds,
                ttft_s=_quantiles(last.ttft, now.ttft),
                itl_s=_quantiles(last.itl, now.itl),
                waiting=now.waiting,
            )
        )

    def _counted(self) -> _Counted:
        metrics = self._metrics
        return _Counted(
            at=time.monotonic(),
            tokens=_sum(metrics.generated_tokens.collect(), "_total"),
            requests=_sum(metrics.requests.collect(), "_total"),
            waiting=int(_sum(metrics.requests_waiting.collect(), "")),
            ttft=_buckets(metrics.time_to_first_token.collect()),
            itl=_buckets(metrics.inter_token_latency.collect()),
        )


@dataclass(frozen=True, slots=True)
class _Counted:
    at: float
    tokens: float
    requests: float
    waiting: int
    ttft: Sequence[tuple[float, float]]  # (upper bound, cumulative count)
    itl: Sequence[tuple[float, float]]


def quantile(q: float, counts: Sequence[tuple[float, float]]) -> float | None:
    """Return the q-quantile of a histogram, interpolated as in Prometheus; None if it is empty.

    counts: (upper bound, cumulative count) in ascending order.
    """
    total = counts[-1][1] if counts else 0.0
    if not total:
        return None
    rank, (bound, count) = q * total, counts[0]
    if rank <= count:
        return bound * rank / count
    for (low, below), (high, count) in pairwise(counts):
        if rank <= count:
            return low if high == float("inf") else low + (high - low) * (rank - below) / (count - below)
    return counts[-1][0]


def _quantiles(
    before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]
) -> tuple[float, float] | None:
    counts = [(bound, now - then) for (bound, now), (_, then) in zip(after, before, strict=True)]
    middle, high = quantile(0.5, counts), quantile(0.99, counts)
    return None if middle is None or high is None else (middle, high)


def _buckets(families: Iterable[Metric]) -> list[tuple[float, float]]:
    samples = [sample for family in families for sample in family.samples if sample.name.endswith("_bucket")]
    return [(float(sample.labels["le"]), sample.value) for sample in samples]


def _sum(families: Iterable[Metric], ending: str) -> float:
    return sum(s.value for family in families for s in family.samples if s.name == family.name + ending)
