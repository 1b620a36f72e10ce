"""Usage accounting of a completion: metrics, audit log, trace, traffic record and log line."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from core.types.errors import ClusterError, outcome_of
from core.types.request import OFFLINE
from core.types.timeline import RequestPhase, Timeline
from frontend.text.answer_events import TokenClock
from frontend.text.audit_log import RequestAuditLog
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import TokenUsage
from router.generation import RequestRoute
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Trace
from router.telemetry.traffic import TrafficRecord

logger = logging.getLogger(__name__)


class Account:
    """Account of one completion."""

    def __init__(
        self,
        request: CompletionRequest,
        *,
        model: str,
        clock: TokenClock,
        metrics: Metrics,
        audit_log: RequestAuditLog,
        traffic: TrafficRecord | None,
        trace: Trace | None,
    ) -> None:
        """clock: the request's own. traffic: None: not recorded. trace: None: not traced."""
        self._request = request
        self._model = model
        self._clock = clock
        self._metrics = metrics
        self._audit_log = audit_log
        # Offline requests do not count as traffic: no client waits for them.
        self._traffic = None if request.priority >= OFFLINE else traffic
        self._trace = trace
        self._seen_as = range(0)  # its ids in the traffic record
        self._life = Timeline()

    def rejected(self, error: ClusterError) -> None:
        """Record that the request is rejected."""
        self._metrics.requests.labels(outcome_of(error).code).inc()
        self._audit_log.rejected(self._request, error)

    def arrived(self, prompt_ids: Sequence[int]) -> None:
        """Record that the request is about to run; it counts as traffic from now on."""
        if self._traffic is not None:
            clock = self._clock
            self._seen_as = self._traffic.arrived(
                prompt_ids,
                salt=self._request.salt,
                num_choices=self._request.num_choices,
                ttft_s=lambda: clock.ttft_s,
            )

    def started(self, life: Timeline) -> None:
        """Take over the generation's timeline and move its beginning back to the request's arrival."""
        self._life = life
        entered, life.began = life.began, self._clock.began
        life.add(RequestPhase.PREPARE, "", life.began, entered)
        life.trace_id = self._trace.id if self._trace else ""

    def over(
        self, outcome: str, usage: TokenUsage, route: RequestRoute, *, num_outputs: Iterable[int], max_tokens: int
    ) -> None:
        """Record the end, once, whatever the outcome. num_outputs: tokens of each choice. max_tokens: limit of each."""
        clock, life, request = self._clock, self._life, self._request
        if self._traffic is not None:
            self._traffic.over(self._seen_as, num_outputs, ttft_s=clock.ttft_s, itl_s=clock.itl_s)
        self._metrics.requests.labels(outcome).inc()
        self._metrics.request_time.observe(clock.elapsed_s)
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.cached_tokens.inc(usage.cached_tokens)
        ttft_s = clock.ttft_s
        life.ended, life.outcome, life.first_s = clock.began + clock.elapsed_s, outcome, ttft_s
        if self._trace and self._trace.is_sampled:
            self._trace.tell(self._span_attributes(outcome, usage, route), life)
        self._audit_log.done(request, outcome, usage, max_tokens=max_tokens, s=clock.elapsed_s, ttft_s=ttft_s)
        logger.info(
            "request done request=%s outcome=%s prompt_tokens=%d cached_tokens=%d fetched_tokens=%d "
            "completion_tokens=%d prefill=%s decode=%s blocks=%d bytes=%d attempts=%d ttft_ms=%.1f itl_ms=%.1f ms=%.1f",
            request.id, outcome, usage.prompt_tokens, route.cached_tokens, route.fetched_tokens,
            usage.completion_tokens,
            route.prefill_replica, route.decode_replica, route.blocks_shipped, route.wire_bytes, route.attempts,
            clock.ttft_s * 1e3, clock.itl_s * 1e3, clock.elapsed_s * 1e3,
        )  # fmt: skip

    def _span_attributes(self, outcome: str, usage: TokenUsage, route: RequestRoute) -> dict[str, str | int | float]:
        """Return the span's attributes, named by OpenTelemetry's semantic conventions where those exist."""
        return {
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "xpyd.request": self._request.id,
            "xpyd.tenant": self._request.tenant,
            "xpyd.outcome": outcome,
            "xpyd.cached_tokens": usage.cached_tokens,
            "xpyd.prefill": route.prefill_replica,
            "xpyd.decode": route.decode_replica,
            "xpyd.wire_bytes": route.wire_bytes,
            "xpyd.attempts": route.attempts,
            "xpyd.ttft_s": self._clock.ttft_s,
            "xpyd.itl_s": self._clock.itl_s,
        }
