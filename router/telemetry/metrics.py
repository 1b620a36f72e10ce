"""Every metric that this project exports, declared once: name, unit, meaning.

What a router sees of its own requests it counts itself; what only a replica can know comes with the replica's Status
and is exported as it was last heard. Names carry base units and, where they count, `_total`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from core.rpc import worker_pb2
from core.types.errors import outcome_codes
from core.types.request import Role

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Bounds of the histogram buckets, in seconds.
_WAIT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_WHOLE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)

# Of a replica's Status. Every series is labelled with replica and role.
_GAUGES = (
    ("running", "sequences_running", "Sequences in the batch."),
    ("waiting", "sequences_waiting", "Sequences admitted and not yet in the batch."),
    ("queued_tokens", "queued_prompt_tokens", "Prompt tokens admitted and not yet computed."),
    ("context_tokens", "context_tokens", "Tokens held by running sequences."),
    ("blocks_total", "kv_blocks", "KV blocks of the pool, whatever their state."),
    ("blocks_free", "kv_blocks_free", "KV blocks that hold nothing."),
    ("blocks_cached", "kv_blocks_cached", "KV blocks that hold a prefix which no sequence uses; they count as room."),
    ("link_bytes_per_s", "link_bytes_per_second", "What the replica's links have carried while they were busy."),
    ("blocks_host", "kv_blocks_in_memory", "KV blocks that the replica keeps in the machine's memory."),
    ("blocks_disk", "kv_blocks_on_disk", "KV blocks that the replica keeps in files."),
    ("host_bytes_per_s", "kv_host_bytes_per_second", "Measured, from memory to the device."),
    ("disk_bytes_per_s", "kv_disk_bytes_per_second", "Measured, from files to the device."),
    ("corpus_tokens", "corpus_tokens", "Of finished answers that the replica drafts from."),
    ("tokens_per_row", "step_tokens_per_row", "Tokens that a choice gets in a step: more than 1 with drafts."),
    ("drafted_per_row", "step_drafted_per_row", "Drafted tokens that a choice has computed in a step."),
    ("draining", "replica_draining", "1 while the replica finishes what it has and takes no more."),
)
# The rates that it has learnt of itself; absent until there are any.
_RATES = (
    ("base_s", "step_base_seconds", "What every step takes, whatever is in it."),
    ("token_s", "step_token_seconds", "What a step takes for each token."),
    ("pair_s", "step_pair_seconds", "What a step takes for each pair of a prompt's token and a position before it."),
    ("context_s", "step_context_seconds", "What a step takes for each position that a decoding sequence reads."),
)
# Of what it drafts (speculation), by method and by place in the draft, the first being 0.
_DRAFTS = (
    ("tokens", "speculation_drafted_tokens_total", "Tokens drafted, and computed to see whether they are right."),
    ("accepted", "speculation_accepted_tokens_total", "Of these, those that were right: generated tokens, too."),
)
# Of its Totals, since the replica started.
_COUNTERS = (
    ("prompt_tokens", "replica_prompt_tokens_total", "Prompt tokens admitted."),
    ("prefix_hit_tokens", "prefix_hit_tokens_total", "Prompt tokens whose KV the replica already held."),
    ("generated_tokens", "replica_generated_tokens_total", "Tokens sampled, or forced."),
    ("forced_tokens", "replica_forced_tokens_total", "Of these, those that grammars forced: several in one step."),
    ("host_hit_tokens", "kv_host_hit_tokens_total", "Prompt tokens whose KV came back from memory."),
    ("disk_hit_tokens", "kv_disk_hit_tokens_total", "Prompt tokens whose KV came back from files."),
    ("host_saved_bytes", "kv_host_saved_bytes_total", "KV copied to memory."),
    ("disk_saved_bytes", "kv_disk_saved_bytes_total", "KV handed on to be written to files."),
    ("tier_losses", "kv_tier_losses_total", "Blocks dropped on their way to memory or files, or not whole there."),
    ("transfer_bytes", "kv_transfer_bytes_total", "Bytes on the links, headers included."),
    ("transfer_seconds", "kv_transfer_seconds_total", "Time that handoffs took, from first byte to acknowledgement."),
    ("transfers", "kv_transfers_total", "Handoffs carried out."),
    ("transfer_failures", "kv_transfer_failures_total", "Handoffs that failed."),
    ("prefix_fetches", "prefix_pulls_total", "Prefixes fetched from another replica instead of computed."),
    ("fetched_tokens", "pulled_tokens_total", "Prompt tokens whose KV came from another replica."),
    ("pull_failures", "prefix_pull_failures_total", "Pulls of which nothing came: what was wanted was computed."),
    ("pull_seconds", "prefix_pull_seconds_total", "Time that pulls took, from asking to the last byte."),
    ("preemptions", "preemptions_total", "Sequences that lost their blocks and were computed again."),
    ("cancelled", "cancelled_sequences_total", "Sequences ended before they were finished."),
)


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A metric as it is exported."""

    name: str  # with its `_total`
    kind: str  # "counter", "gauge" or "histogram"
    meaning: str


def declared() -> list[Declared]:
    """Every metric, in the order in which they are exported."""
    metrics = Metrics()
    metrics.watch(list)
    return [
        Declared(
            name=family.name + ("_total" if family.type == "counter" else ""),
            kind=family.type,
            meaning=family.documentation,
        )
        for family in metrics.registry.collect()
    ]


class Metrics:
    """One router's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "requests_total",
            "Requests by how they ended: completed, cancelled, or the code of the error.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("completed", "cancelled", *outcome_codes()):  # so that the first one of a kind is seen to come
            self.requests.labels(outcome)
        self.prompt_tokens = Counter("prompt_tokens_total", "Prompt tokens of requests.", registry=registry)
        self.cached_tokens = Counter(
            "cached_prompt_tokens_total", "Prompt tokens of requests that were not computed again.", registry=registry
        )
        self.generated_tokens = Counter("generated_tokens_total", "Tokens sent to clients.", registry=registry)
        self.task_deaths = Counter(
            "background_task_deaths_total",
            "Tasks of the router that died, or ended, and were started again.",
            ["task"],
            registry=registry,
        )
        self.members_rejected = Counter(
            "member_records_refused_total",
            "Members to whom nobody connects: their record is not signed by this deployment or makes no sense, or they "
            "speak another version on the wire. The router's log names them.",
            ["reason"],
            registry=registry,
        )
        self.requests_waiting = Gauge(
            "requests_waiting", "Requests queued until a replica has room.", registry=registry
        )
        self.local_decodes = Counter(
            "prefill_answers_total",
            "Times that a prefill replica was chosen to answer a request all by itself, decode replicas being full or "
            "gone.",
            registry=registry,
        )
        self.tenants_at_share = Gauge(
            "tenants_at_share",
            "Tenants of which requests wait because others of theirs run: see `router.tenant_share`.",
            registry=registry,
        )
        self.queue_time = Histogram(
            "queue_time_seconds", "Until a replica admits the request.", buckets=_WAIT, registry=registry
        )
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "From a request's arrival.", buckets=_WAIT, registry=registry
        )
        self.inter_token_latency = TokenHistogram(
            "inter_token_latency_seconds", "Between two tokens of one choice.", buckets=_STEP, registry=registry
        )
        self.request_time = Histogram(
            "request_time_seconds", "From arrival to the last token.", buckets=_WHOLE, registry=registry
        )

    def watch(self, statuses: Callable[[], Iterable[tuple[Role, worker_pb2.Status]]]) -> None:
        """Export also what each replica last said of itself. `statuses` is asked at every scrape."""
        self.registry.register(_ReplicaCollector(statuses))

    def render(self) -> bytes:
        """Prometheus's text format, of type CONTENT_TYPE."""
        return generate_latest(self.registry)


class TokenHistogram(Collector):
    """A histogram like prometheus_client's, for what each token adds to: on one thread, without locks."""

    def __init__(self, name: str, meaning: str, *, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._meaning = name, meaning
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum_s = 0.0
        registry.register(self)

    def observe(self, seconds: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum_s += seconds * count

    def collect(self) -> Iterator[Metric]:
        bounds = map(floatToGoString, self._bounds)
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._meaning, buckets=buckets, sum_value=self._sum_s)


class _ReplicaCollector(Collector):
    """A replica that has left is not in `statuses`, so that its series end with it."""

    def __init__(self, statuses: Callable[[], Iterable[tuple[Role, worker_pb2.Status]]]) -> None:
        self._statuses = statuses

    def describe(self) -> Iterable[Metric]:
        return [*_families().values()]

    def collect(self) -> Iterator[Metric]:
        families = _families()
        for role, status in self._statuses():
            labels = (status.replica, role.value)
            for field, name, _ in _GAUGES:
                families[name].add_metric(labels, float(getattr(status, field)))
            for field, name, _ in _RATES if status.HasField("timing") else ():
                families[name].add_metric(labels, float(getattr(status.timing, field)))
            for field, name, _ in _COUNTERS:
                families[name].add_metric(labels, float(getattr(status.totals, field)))
            for drafted in status.totals.drafted:
                for field, name, _ in _DRAFTS:
                    for place, count in enumerate(getattr(drafted, field)):
                        families[name].add_metric((*labels, drafted.method, str(place)), float(count))
        yield from families.values()


def _families() -> dict[str, GaugeMetricFamily | CounterMetricFamily]:
    labels = ("replica", "role")
    gauges = {name: GaugeMetricFamily(name, meaning, labels=labels) for _, name, meaning in (*_GAUGES, *_RATES)}
    drafts = {
        name: CounterMetricFamily(name, meaning, labels=(*labels, "method", "place")) for _, name, meaning in _DRAFTS
    }
    counters = {name: CounterMetricFamily(name, meaning, labels=labels) for _, name, meaning in _COUNTERS}
    return gauges | counters | drafts
