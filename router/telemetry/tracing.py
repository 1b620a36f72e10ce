"""Spans of requests, for whoever collects them by OTLP: the request itself, and below it each state of its life.

A request's own span begins at the door, under the client's `traceparent` if it came with one, and goes on to the
replicas in the metadata of their calls. The spans below it are made when it is over, from what the router has noted of
its life anyway, and only where it is sampled: so a token's way knows nothing of any of this. They are sent by a thread
of the exporter's, which drops what it has no room for.

Spans of what passed on a replica say so by their resource. The replicas themselves send none: they tell the router
durations, so that a trace is whole also where a replica was lost, and no clocks are compared.
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

if TYPE_CHECKING:  # whoever does not trace does not load it
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

_MAX_REPLICAS = 256  # whose resources are kept; ids are never used again
_LAST_WORDS_S = 3.0  # for spans to be sent, the last ones included
_SAY_S = 60.0
_ROUTER = "router"


class Tracing:
    """Of one router. Lives on its event loop."""

    def __init__(self, processor: SpanProcessor, *, ratio: float, deployment: str, router: str) -> None:
        """processor: to which spans go. ratio: of the requests that nobody else has decided on."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # It would repeat a client's words, line by line, where its `tracestate` makes no sense.
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
        """None where nobody collects. Raises SpecError where the exporter is not installed."""
        if spec.otlp_endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise SpecError(
                "tracing.otlp_endpoint needs a package that is not there: "
                "pip install opentelemetry-exporter-otlp-proto-http"
            ) from None
        endpoint = None if spec.otlp_endpoint == "environment" else spec.otlp_endpoint.rstrip("/") + "/v1/traces"
        processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_LAST_WORDS_S))
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(Seldom(_SAY_S))
        return cls(processor, ratio=spec.ratio, deployment=deployment, router=router)

    def begin(self, name: str, headers: Mapping[str, str]) -> Trace | None:
        """A request is at the door. headers: with `traceparent` and `tracestate` in small letters, if it has them; what
        makes no sense there begins a trace of its own. None: nobody has decided on it, and it is not drawn."""
        if "traceparent" not in headers and random.random() >= self._ratio:
            return None
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        parent = self._propagator.extract(headers, context=Context())
        span = self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER)
        return Trace(self, span)

    def tracer_of(self, replica: str) -> Tracer:
        """By which spans of what passed there are made; "": here."""
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
        """Send what waits for that. Waits a few seconds; call it on a thread."""
        self._processor.force_flush(int(1e3 * _LAST_WORDS_S))

    def close(self) -> None:
        """Send what is left, likewise."""
        self.flush()
        self._processor.shutdown()

    def _provider(self, role: str, instance: str) -> TracerProvider:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import DEFAULT_ON

        who = {
            "service.namespace": self._deployment,
            "service.name": f"xpyd-{role}",
            "service.instance.id": instance,
        }
        provider = TracerProvider(sampler=DEFAULT_ON, resource=Resource.create(who), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider


class Seldom(logging.Filter):
    """Of records in a row, lets through the first of each so many seconds: a collector that is away is news once."""

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
    """Of one request at a door, with all the prompts that it brought."""

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
        """One of its prompts is over; where it is sampled. attributes: of all that was done for it."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        for name, value in attributes.items():
            self._span.set_attribute(name, value)
        for trouble in life.troubles:
            self._span.add_event("goes on elsewhere", {"reason": trouble})
        below = set_span_in_context(self._span, Context())
        wall_ns = time.time_ns() - int(1e9 * (time.monotonic() - life.began))
        for span in life.told():
            self._tell(span, below, wall_ns, request=str(attributes.get("xpyd.request", "")))

    def end(self, *, status: str = "", is_our_fault: bool = False) -> None:
        """The door has nothing more to say. status: its protocol's."""
        if self.is_sampled:
            from opentelemetry.trace import Status, StatusCode

            if status:
                self._span.set_attribute("xpyd.status", status)
            if is_our_fault:
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def _tell(self, span: Span, below: Context, wall_ns: int, *, request: str) -> None:
        attributes: dict[str, Any] = {"xpyd.request": request}
        if span.replica:
            attributes["xpyd.replica"] = span.replica
        made = self._tracing.tracer_of(span.replica).start_span(
            span.state.value, below, attributes=attributes, start_time=wall_ns + int(1e9 * span.start_s)
        )
        made.end(wall_ns + int(1e9 * span.end_s))
