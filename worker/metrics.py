"""Prometheus metrics of one replica, served by its rank 0.

Each series carries the labels deployment, model, replica and role. Names carry base units; counters end in `_total` and
count from the start of the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.rpc import worker_pb2
from core.types.errors import DeployError
from core.types.network import format_address

# Fields of Status.
_GAUGES = (
    ("running", "xpyd_sequences_running", "Sequences in the batch."),
    ("waiting", "xpyd_sequences_waiting", "Sequences admitted and not yet in the batch."),
    ("queued_tokens", "xpyd_queued_prompt_tokens", "Prompt tokens admitted and not yet computed."),
    ("context_tokens", "xpyd_context_tokens", "Tokens held by running sequences."),
    ("blocks_total", "xpyd_kv_blocks", "KV blocks of the pool in any state."),
    ("blocks_free", "xpyd_kv_blocks_free", "KV blocks that are free and hold no prefix."),
    ("blocks_cached", "xpyd_kv_blocks_cached", "KV blocks that hold an unused prefix, evicted when room is needed."),
    ("states", "xpyd_kv_states", "State slots of recurrent layers, one per running sequence or checkpoint."),
    ("checkpoints", "xpyd_kv_checkpoints", "State slots that keep the end of a cached prefix."),
    ("window_parts", "xpyd_kv_window_parts", "KV blocks that also have room in layers that free KV behind a window."),
    ("window_parts_cached", "xpyd_kv_window_parts_cached", "KV blocks with such room that only a cached prefix uses."),
    ("link_bytes_per_s", "xpyd_link_bytes_per_second", "Measured rate of the KV links while they are busy."),
    ("blocks_host", "xpyd_kv_host_blocks", "Blocks' places used in host memory; a checkpoint or window takes several."),
    ("blocks_disk", "xpyd_kv_disk_blocks", "Blocks' places used on disk; a checkpoint or window takes several."),
    ("host_bytes_per_s", "xpyd_kv_host_bytes_per_second", "Measured rate from host memory to the device."),
    ("disk_bytes_per_s", "xpyd_kv_disk_bytes_per_second", "Measured rate from disk to the device."),
    ("corpus_tokens", "xpyd_corpus_tokens", "Tokens of finished answers that the replica drafts from."),
    ("tokens_per_row", "xpyd_step_tokens_per_row", "Mean tokens generated per sequence and step; above 1 with drafts."),
    ("drafted_per_row", "xpyd_step_drafted_tokens_per_row", "Mean drafted tokens verified per sequence and step."),
    ("draining", "xpyd_replica_draining", "1 while the replica drains, else 0."),
)
# Fields of Status.timing, absent until the replica has learned them.
_RATES = (
    ("base_s", "xpyd_step_base_seconds", "Learned fixed time of a step."),
    ("token_s", "xpyd_step_token_seconds", "Learned time of a step per token."),
    ("pair_s", "xpyd_step_pair_seconds", "Learned time of a step per pair of prompt token and earlier position."),
    ("context_s", "xpyd_step_context_seconds", "Learned time of a step per position that a decoding sequence reads."),
)
# Fields of Totals.
_COUNTERS = (
    ("prompt_tokens", "xpyd_replica_prompt_tokens_total", "Prompt tokens admitted by the replica."),
    ("prefix_hit_tokens", "xpyd_prefix_hit_tokens_total", "Prompt tokens found in the KV cache of the replica."),
    ("generated_tokens", "xpyd_replica_generated_tokens_total", "Tokens sampled or forced by the replica."),
    ("forced_tokens", "xpyd_replica_forced_tokens_total", "Generated tokens that a grammar forced."),
    ("host_hit_tokens", "xpyd_kv_host_hit_tokens_total", "Prompt tokens loaded from host memory."),
    ("disk_hit_tokens", "xpyd_kv_disk_hit_tokens_total", "Prompt tokens loaded from disk."),
    ("host_saved_bytes", "xpyd_kv_host_saved_bytes_total", "Bytes of KV copied to host memory."),
    ("disk_saved_bytes", "xpyd_kv_disk_saved_bytes_total", "Bytes of KV passed on to be written to disk."),
    ("tier_losses", "xpyd_kv_tier_lost_blocks_total", "KV blocks lost on the way to or from host memory or disk."),
    ("transfer_bytes", "xpyd_kv_transfer_bytes_total", "Bytes sent on the KV links, headers included."),
    ("transfer_seconds", "xpyd_kv_transfer_seconds_total", "Time of KV handoffs, from first byte to acknowledgement."),
    ("transfers", "xpyd_kv_transfers_total", "KV handoffs completed."),
    ("transfer_failures", "xpyd_kv_transfer_failures_total", "KV handoffs failed."),
    ("prefix_fetches", "xpyd_prefix_fetches_total", "Prefixes fetched from another replica."),
    ("fetched_tokens", "xpyd_fetched_tokens_total", "Prompt tokens fetched from another replica."),
    ("fetch_failures", "xpyd_prefix_fetch_failures_total", "Prefix fetches failed; the replica computed the prefix."),
    (
        "fetch_seconds",
        "xpyd_prefix_fetch_seconds_total",
        "Time of completed prefix fetches, from request to last byte.",
    ),
    ("preemptions", "xpyd_preemptions_total", "Sequences preempted: they lost their blocks and are recomputed."),
    ("cancelled", "xpyd_cancelled_sequences_total", "Sequences cancelled before they finished."),
)
# Fields of Totals.drafted, by method and by position in the draft, counted from 0.
_DRAFTS = (
    ("tokens", "xpyd_speculation_drafted_tokens_total", "Drafted tokens verified."),
    ("accepted", "xpyd_speculation_accepted_tokens_total", "Drafted tokens accepted."),
)

_READ_S = 10.0


def metrics_registry(status: Callable[[], worker_pb2.Status], labels: Mapping[str, str]) -> CollectorRegistry:
    """Return a registry that reads the latest status at every scrape. labels: of every series."""
    registry = CollectorRegistry()
    registry.register(_StatusCollector(status, labels))
    return registry


class MetricsServer:
    """HTTP server of one replica's `/metrics`, on daemon threads."""

    def __init__(self, registry: CollectorRegistry, *, host: str) -> None:
        """Listen on a free port of `host`. Raises DeployError."""
        try:
            server, _ = start_http_server(0, addr=host, registry=registry)
        except OSError as error:
            raise DeployError(f"metrics cannot be served on {host}: {error}; see router.admin_host") from error
        server.RequestHandlerClass = RequestHandler
        self._server = server
        self.address = format_address(host, server.server_port)

    def close(self) -> None:
        """Start to close the port, which takes up to half a second, and return at once."""
        Thread(target=self._shut_down, name="closing metrics", daemon=True).start()

    def _shut_down(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class RequestHandler(WSGIRequestHandler):
    timeout = _READ_S  # a client that sends nothing does not hold its thread for longer

    def handle(self) -> None:
        with suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _StatusCollector(Collector):
    def __init__(self, status: Callable[[], worker_pb2.Status], labels: Mapping[str, str]) -> None:
        self._status = status
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        status, names, values = self._status(), (*self._labels,), (*self._labels.values(),)
        timing = status.timing if status.HasField("timing") else None
        for source, fields in ((status, _GAUGES), (timing, _RATES)):
            for field, name, meaning in fields:
                gauge = GaugeMetricFamily(name, meaning, labels=names)
                if source is not None:
                    gauge.add_metric(values, float(getattr(source, field)))
                yield gauge
        for field, name, meaning in _COUNTERS:
            counter = CounterMetricFamily(name, meaning, labels=names)
            counter.add_metric(values, float(getattr(status.totals, field)))
            yield counter
        for field, name, meaning in _DRAFTS:
            counter = CounterMetricFamily(name, meaning, labels=(*names, "method", "position"))
            for drafted in status.totals.drafted:
                for position, count in enumerate(getattr(drafted, field)):
                    counter.add_metric((*values, drafted.method, str(position)), float(count))
            yield counter
