"""OTLP tracing: one span per request, with a child span for each phase of its timeline.

The request's span begins at the endpoint, as a child of the client's `traceparent` if there is one. Calls to replicas
carry its `traceparent` in their metadata. The child spans are created when the request ends, from the timeline that the
router keeps anyway, and only if the request is sampled, so tracing adds no work per token. A thread of the exporter
sends the spans and drops those that exceed its queue.

The resource of a span names the replica where the phase ran. Replicas send no spans: they report durations to the
router, so a trace is complete even if a replica was lost, and clocks are never compared.
"""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from core.spec.schema import TracingSpec
from core.types.errors import SpecError
from core.types.timeline import Span, Timeline

if TYPE_CHECKING:  # opentelemetry is loaded only if tracing is on
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

_MAX_REPLICAS = 256  # tracers kept, one per replica; replica ids are never reused
_EXPORT_TIMEOUT_S = 3.0
_LOG_INTERVAL_S = 60.0
_ROUTER = "router"


class Tracing:
    """Tracing of one router. Lives on its event loop."""

    def __init__(self, processor: SpanProcessor, *, ratio: float, deployment: str, router: str) -> None:
        """processor: receives the finished spans. ratio: sampled fraction of requests without a `traceparent`."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Below ERROR it logs the client's text, line by line, for a malformed `tracestate`.
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
        self._processor = processor
        self._deployment = deployment
        self._router = router
        self._ratio = ratio
        self._propagator = TraceContextTextMapPropagator()
        self._tracers: OrderedDict[str, tuple[TracerProvider, Tracer]] = OrderedDict()  # by replica
        self._own = self._provider(_ROUTER, router)
        self._tracer = self._own.get_tracer("xpyd")

    @classmethod
    def of(cls, spec: TracingSpec, *, deployment: str, router: str) -> Tracing | None:
        """Build the tracing of a spec; None if it has no endpoint. Raises SpecError if the exporter is missing."""
        if spec.otlp_endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise SpecError(
                "tracing.otlp_endpoint needs a package that is not installed: "
                "pip install opentelemetry-exporter-otlp-proto-http"
            ) from None
        endpoint = None if spec.otlp_endpoint == "environment" else spec.otlp_endpoint.rstrip("/") + "/v1/traces"
        processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S))
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(LogThrottle(_LOG_INTERVAL_S))
        return cls(processor, ratio=spec.ratio, deployment=deployment, router=router)

    def begin(self, name: str, headers: Mapping[str, str]) -> Trace | None:
        """Begin the trace of a request; None if it has no `traceparent` and is not sampled.

        headers: lower-case names; `traceparent` and `tracestate` are used if present. Malformed ones start a new trace.
        """
        if "traceparent" not in headers and random.random() >= self._ratio:
            return None
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(headers, context=Context())
        span = self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER)
        return Trace(self, span)

    def tracer_of(self, replica: str) -> Tracer:
        """Return the tracer for spans of a replica, or of this router if `replica` is empty."""
        if not replica:
            return self._tracer
        if found := self._tracers.get(replica):
            self._tracers.move_to_end(replica)
            return found[1]
        provider = self._provider(replica.rpartition("-")[0] or replica, replica)
        tracer = provider.get_tracer("xpyd")
        self._tracers[replica] = provider, tracer
        if len(self._tracers) > _MAX_REPLICAS:
            self._tracers.popitem(last=False)
        return tracer

    def flush(self) -> None:
        """Send the queued spans. Blocks for up to _EXPORT_TIMEOUT_S: call it on a thread."""
        self._processor.force_flush(int(1e3 * _EXPORT_TIMEOUT_S))

    def close(self) -> None:
        """Send the queued spans and shut down. Blocks like `flush`."""
        self.flush()
        self._processor.shutdown()

    def _provider(self, role: str, instance: str) -> TracerProvider:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import DEFAULT_ON

        attributes = {
            "service.namespace": self._deployment,
            "service.name": f"xpyd-{role}",
            "service.instance.id": instance,
        }
        provider = TracerProvider(sampler=DEFAULT_ON, resource=Resource.create(attributes), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider


class LogThrottle(logging.Filter):
    """Log filter that passes at most one record per interval, for errors that an absent collector repeats."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._last: float | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if self._last is not None and now - self._last < self._seconds:
            return False
        self._last = now
        return True


class Trace:
    """Trace of one client request, with all its prompts."""

    def __init__(self, tracing: Tracing, span: OtelSpan) -> None:
        context = span.get_span_context()
        self.id = f"{context.trace_id:032x}"
        self.traceparent = f"00-{self.id}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        self._tracing = tracing
        self._span = span

    @property
    def is_sampled(self) -> bool:
        return self._span.is_recording()

    def tell(self, attributes: Mapping[str, str | int | float], life: Timeline) -> None:
        """Add the spans of a finished prompt; call it only if the trace is sampled.

        attributes: set on the request's span.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        for name, value in attributes.items():
            self._span.set_attribute(name, value)
        for trouble in life.troubles:
            self._span.add_event("goes on elsewhere", {"reason": trouble})
        parent = set_span_in_context(self._span, Context())
        wall_ns = time.time_ns() - int(1e9 * (time.monotonic() - life.began))
        for span in life.told():
            self._add_child(span, parent, wall_ns, request=str(attributes.get("xpyd.request", "")))

    def end(self, *, status: str = "", is_our_fault: bool = False) -> None:
        """End the request's span. status: status code of the endpoint's protocol."""
        if self.is_sampled:
            from opentelemetry.trace import Status, StatusCode

            if status:
                self._span.set_attribute("xpyd.status", status)
            if is_our_fault:
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def _add_child(self, span: Span, parent: Context, wall_ns: int, *, request: str) -> None:
        """Emit one phase as a child span. wall_ns: wall-clock time at the start of the timeline."""
        attributes: dict[str, Any] = {"xpyd.request": request}
        if span.replica:
            attributes["xpyd.replica"] = span.replica
        child = self._tracing.tracer_of(span.replica).start_span(
            span.state.value, parent, attributes=attributes, start_time=wall_ns + int(1e9 * span.start_s)
        )
        child.end(wall_ns + int(1e9 * span.end_s))
