"""Usage accounting of a completion: metrics, audit log, trace, traffic record and log line."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from core.types.api_key import ApiKey
from core.types.errors import ClusterError, RequestError, outcome_of
from core.types.timeline import RequestPhase, Timeline
from frontend.text.answer_events import TokenClock
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import TokenUsage
from router.generation import RequestRoute
from router.telemetry.metrics import Metrics
from router.telemetry.tracing import Trace
from router.telemetry.traffic import TrafficRecord

logger = logging.getLogger(__name__)

_MAX_BYTES, _NUM_BACKUPS = 64 * 2**20, 4


@dataclass(eq=False)
class Account:
    """Account of one completion."""

    request: CompletionRequest
    model: str
    clock: TokenClock  # the request's own
    metrics: Metrics
    audit_log: RequestAuditLog
    traffic: TrafficRecord | None  # None: not recorded
    trace: Trace | None  # None: not traced

    def __post_init__(self) -> None:
        self._seen_as = range(0)  # its ids in the traffic record
        self._life = Timeline()

    def arrived(self, prompt_ids: Sequence[int]) -> None:
        """Record that the request is about to run; it counts as traffic from now on."""
        if self.traffic is not None:
            clock, request = self.clock, self.request
            self._seen_as = self.traffic.arrived(
                prompt_ids, salt=request.salt, num_choices=request.num_choices, ttft_s=lambda: clock.ttft_s
            )

    def started(self, life: Timeline) -> None:
        """Take over the generation's timeline and move its beginning back to the request's arrival."""
        self._life = life
        entered, life.began = life.began, self.clock.began
        life.add(RequestPhase.PREPARE, "", life.began, entered)
        life.trace_id = self.trace.id if self.trace else ""

    def over(
        self, outcome: str, usage: TokenUsage, route: RequestRoute, *, num_outputs: Iterable[int], max_tokens: int
    ) -> None:
        """Record the end, once, whatever the outcome. num_outputs: tokens of each choice. max_tokens: limit of each."""
        clock, life, request = self.clock, self._life, self.request
        if self.traffic is not None:
            self.traffic.over(self._seen_as, num_outputs, ttft_s=clock.ttft_s, itl_s=clock.itl_s)
        self.metrics.requests.labels(outcome).inc()
        self.metrics.request_time.observe(clock.elapsed_s)
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
        self.metrics.cached_tokens.inc(usage.cached_tokens)
        life.ended, life.outcome, life.first_s = clock.began + clock.elapsed_s, outcome, clock.ttft_s
        if self.trace and self.trace.is_sampled:
            self.trace.tell(self._span_attributes(outcome, usage, route), life)
        self.audit_log.done(request, outcome, usage, max_tokens=max_tokens, clock=clock)
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
            "gen_ai.request.model": self.model,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "xpyd.request": self.request.id,
            "xpyd.tenant": self.request.tenant,
            "xpyd.outcome": outcome,
            "xpyd.cached_tokens": usage.cached_tokens,
            "xpyd.prefill": route.prefill_replica,
            "xpyd.decode": route.decode_replica,
            "xpyd.wire_bytes": route.wire_bytes,
            "xpyd.attempts": route.attempts,
            "xpyd.ttft_s": self.clock.ttft_s,
            "xpyd.itl_s": self.clock.itl_s,
        }


class RequestAuditLog:
    """Audit log of requests: one line of JSON for each, whatever its outcome, and never any of its text.

    A rotating file, readable by its owner only; without a path nothing is written. Separate from the process log, which
    is for debugging and is discarded.
    """

    def __init__(self, path: Path | None = None, *, max_bytes: int = _MAX_BYTES) -> None:
        """max_bytes: size at which the file rotates to path.1, and so on to path.4."""
        self._logger = logging.Logger("audit_log")
        if path is None:
            self._logger.disabled = True
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_private(path)
        handler = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=_NUM_BACKUPS, encoding="utf-8")
        handler.rotator = _rotate
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._logger.addHandler(handler)

    def done(
        self, request: CompletionRequest, outcome: str, usage: TokenUsage, *, max_tokens: int, clock: TokenClock
    ) -> None:
        """Record a request that was admitted and has ended."""
        self._write(
            **_client_fields(request),
            outcome=outcome,
            n=request.num_choices,
            max_tokens=max_tokens,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ms=round(clock.elapsed_s * 1e3, 1),
            ttft_ms=round(clock.ttft_s * 1e3, 1),
        )

    def rejected(self, request: CompletionRequest, error: ClusterError) -> None:
        param = error.param if isinstance(error, RequestError) else None
        self._write(**_client_fields(request), outcome=outcome_of(error).code, param=param)

    def unreadable(self, request_id: str, error: ClusterError, *, key: ApiKey | None, peer: str) -> None:
        """Record an unreadable request. Omits the field name, which may be the client's own text."""
        key_id, tenant = (key.id, key.tenant) if key else ("", "")
        self._write(request=request_id, key=key_id, tenant=tenant, peer=peer, outcome=outcome_of(error).code)

    def close(self) -> None:
        for handler in self._logger.handlers:
            handler.close()

    def _write(self, **fields: Any) -> None:
        if not self._logger.disabled:
            self._logger.info("%s", json.dumps({"time": round(time.time(), 3), **fields}, ensure_ascii=True))


def _make_private(path: str | Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))


def _rotate(source: str, to: str) -> None:
    """Rotate the file, and create the next one as private; the handler would create it readable by all."""
    os.rename(source, to)
    _make_private(source)


def _client_fields(request: CompletionRequest) -> dict[str, str]:
    return {"request": request.id, "key": request.key_id, "tenant": request.tenant, "peer": request.peer}
