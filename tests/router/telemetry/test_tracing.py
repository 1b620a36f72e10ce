"""Propagation of a client's `traceparent` through both endpoints, and the spans of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from core.identity.process_name import ProcessName
from core.process.ports import free_port
from core.rpc import inference_pb2 as pb
from core.spec.schema import TracingSpec
from core.types.errors import CapacityError, SpecError
from core.types.request import SequenceRequest
from core.types.timeline import RequestPhase, Timeline
from router.serving.grpc_worker import GrpcWorker
from router.telemetry import tracing as tracing_module
from router.telemetry.tracing import Tracing
from tests.support.fake_token_service import FakeTokenService
from tests.support.identities import in_clear
from tests.support.members import make_member
from tests.support.serving import serving
from tests.support.tiny_service import MakeCompletions

_TRACE = "0af7651916cd43dd8448eb211c80319c"
_SAMPLED, _NOT_SAMPLED = (f"00-{_TRACE}-b7ad6b7169203331-0{flag}" for flag in (1, 0))


def _is_sampled(traceparent: str) -> bool:
    return bool(int(traceparent.rpartition("-")[2], 16) & 1)


class _Traced:
    """Both endpoints of a traced service, with the exported spans."""

    def __init__(self, make: MakeCompletions, *, ratio: float, **fake: Any) -> None:
        self._exporter = InMemorySpanExporter()
        tracing = Tracing(SimpleSpanProcessor(self._exporter), ratio=ratio, deployment="d", router="router-1")
        self.fake = FakeTokenService(**fake)
        self.completions = make(self.fake, tracing=tracing)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture(params=["http", "grpc"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


async def _ask(traced: _Traced, endpoint: str, traceparent: str | None) -> str | None:
    """Send a request and return the `traceparent` in the response."""
    headers = {"traceparent": traceparent, "tracestate": "v=1"} if traceparent else {}
    async with serving(traced.completions) as served:
        if endpoint == "http":
            body = {"prompt": "hello", "max_tokens": 4, "stream": True}
            answer = await served.http.post("/v1/completions", json=body, headers=headers)
            assert answer.text.endswith("data: [DONE]\n\n")
            return answer.headers.get("traceparent")
        asked = pb.GenerateRequest(prompt="hello", sampling=pb.SamplingParams(max_tokens=4))
        call = served.stub.Generate(asked, metadata=tuple(headers.items()))
        async for _ in call:
            pass
        received = dict(await call.trailing_metadata()).get("traceparent")
        return str(received) if received else None


async def test_the_clients_trace_is_continued(completions: MakeCompletions, endpoint: str) -> None:
    traced = _Traced(completions, ratio=0.0)
    received = await _ask(traced, endpoint, _SAMPLED)
    own, states = traced.spans[-1], traced.spans[:-1]
    assert received == f"00-{_TRACE}-{own.context.span_id:016x}-01", "its own span, in the client's trace"
    assert own.parent and f"{own.parent.span_id:016x}" == "b7ad6b7169203331"
    assert own.context.trace_state.get("v") == "1"
    (sent,) = traced.fake.started
    assert sent.traceparent == received, "as sent to the replicas"
    assert [span.name for span in states] == ["prepare"], "a fake serving side passes no others"
    assert all(span.parent and span.parent.span_id == own.context.span_id for span in states)
    assert own.attributes and own.attributes["xpyd.outcome"] == "completed"
    assert own.attributes["gen_ai.usage.output_tokens"] == 4
    assert own.resource.attributes["service.name"] == "xpyd-router"
    assert "hello" not in json.dumps([json.loads(span.to_json()) for span in traced.spans]), "no text of any request"


async def test_a_client_that_samples_nothing_is_not_traced(completions: MakeCompletions, endpoint: str) -> None:
    traced = _Traced(completions, ratio=1.0)
    received = await _ask(traced, endpoint, _NOT_SAMPLED)
    assert received and received.startswith(f"00-{_TRACE}-") and received.endswith("-00") and not traced.spans
    assert traced.fake.started[0].traceparent == received


async def test_without_traceparent_the_ratio_decides(completions: MakeCompletions, endpoint: str) -> None:
    always, never = _Traced(completions, ratio=1.0), _Traced(completions, ratio=0.0)
    received = await _ask(always, endpoint, None)
    assert received and _is_sampled(received) and _TRACE not in received and len(always.spans) == 2
    assert await _ask(never, endpoint, None) is None and not never.spans


@pytest.mark.parametrize("sent", ["nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
async def test_a_malformed_traceparent_begins_a_new_trace(
    completions: MakeCompletions, endpoint: str, sent: str
) -> None:
    traced = _Traced(completions, ratio=0.0)
    received = await _ask(traced, endpoint, sent)
    assert received and _TRACE not in received and traced.spans[-1].parent is None


@pytest.mark.parametrize("state", ["\x1b[2Jsecret", ",".join(["secret"] * 31), "a=1,a=secret", "secret=1," * 1200])
def test_tracestate_is_never_logged(caplog: pytest.LogCaptureFixture, state: str) -> None:
    """The library logs each malformed entry, with any number of bytes chosen by the client."""
    tracing = Tracing(SimpleSpanProcessor(InMemorySpanExporter()), ratio=0.0, deployment="d", router="router-1")
    for sent in (_SAMPLED, "9" * 60_000):
        trace = tracing.begin("POST /", {"traceparent": sent, "tracestate": state})
        assert trace and len(trace.traceparent) == 55
    assert not caplog.records


async def test_without_a_collector_nothing_is_traced(completions: MakeCompletions, endpoint: str) -> None:
    traced = _Traced(completions, ratio=1.0)
    traced.completions.tracing = None
    assert await _ask(traced, endpoint, _SAMPLED) is None
    assert traced.fake.started[0].traceparent == "" and not traced.spans


async def test_a_failed_request_has_an_error_status(completions: MakeCompletions) -> None:
    traced = _Traced(completions, ratio=1.0, reject=CapacityError("full", retry_after_s=1.0))
    async with serving(traced.completions) as served:
        answer = await served.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4})
        bad = await served.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": -4})
    assert (answer.status_code, bad.status_code) == (429, 400) and "traceparent" in bad.headers
    full, wrong = (span for span in traced.spans if span.parent is None)
    assert full.attributes and full.attributes["xpyd.status"] == "429" and full.status.is_ok is not False
    assert full.attributes["xpyd.outcome"] == "overloaded"
    assert wrong.attributes and wrong.attributes["xpyd.status"] == "400"


def test_replica_phases_carry_the_replicas_resource(completions: MakeCompletions) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), ratio=1.0, deployment="d", router="router-1")
    trace, life = tracing.begin("POST /", {}), Timeline()
    assert trace
    life.add(RequestPhase.COMPUTE, "prefill-0", life.began + 1.0, life.began + 3.0)
    life.add(RequestPhase.DECODE, "decode-12", life.began + 3.0, life.began + 4.0)
    life.troubles.append("decode-3 is lost")
    trace.tell({"xpyd.request": "r"}, life)
    trace.end()
    compute, decode, own = exporter.get_finished_spans()
    resources = [(span.resource.attributes["service.name"], span.resource.attributes["service.instance.id"])
           for span in (compute, decode, own)]  # fmt: skip
    assert resources == [("xpyd-prefill", "prefill-0"), ("xpyd-decode", "decode-12"), ("xpyd-router", "router-1")]
    assert {span.context.trace_id for span in (compute, decode, own)} == {own.context.trace_id}
    assert compute.start_time and compute.end_time and decode.start_time
    assert compute.end_time - compute.start_time == pytest.approx(2e9, abs=1e3)
    assert decode.start_time == pytest.approx(compute.end_time, abs=1e3)
    assert [event.attributes for event in own.events] == [{"reason": "decode-3 is lost"}]


async def test_calls_to_replicas_carry_the_traceparent() -> None:
    metadata: list[dict[str, Any]] = []

    async def hear(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        metadata.append(dict(context.invocation_metadata() or ()))
        return
        yield b""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_stream_rpc_method_handler(hear)

    server = grpc.aio.server(handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    member = make_member("decode-0", address=f"127.0.0.1:{port}")
    worker = GrpcWorker(member, identity=in_clear(ProcessName.of_router("d", "router-0")))
    traced = SequenceRequest(id="r", token_ids=(1,), num_prompt_tokens=1, traceparent=_SAMPLED)
    for request in (traced, SequenceRequest(id="r", token_ids=(1,), num_prompt_tokens=1)):
        for call in (worker.prefill(request), worker.generate(request)):
            assert [event async for event in call] == []
    await worker.close()
    await server.stop(0)
    assert [one.get("traceparent") for one in metadata] == [_SAMPLED, _SAMPLED, None, None]


async def test_a_collector_that_is_away_delays_no_request(
    completions: MakeCompletions, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing_module, "_EXPORT_TIMEOUT_S", 0.2)
    reason = "no exporter here: pip install opentelemetry-exporter-otlp-proto-http"
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter", reason=reason)
    spec = TracingSpec(otlp_endpoint=f"http://127.0.0.1:{free_port()}", ratio=1.0)
    traced = _Traced(completions, ratio=1.0)
    traced.completions.tracing = tracing = Tracing.of(spec, deployment="d", router="r")
    assert tracing
    for _ in range(2):
        assert await _ask(traced, "http", None)
        await asyncio.to_thread(tracing.flush)
    await asyncio.to_thread(tracing.close)
    said = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(said) == 1, "once a minute"


def test_a_missing_exporter_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert Tracing.of(TracingSpec(), deployment="d", router="r") is None
    with pytest.raises(SpecError, match="pip install opentelemetry-exporter-otlp-proto-http"):
        Tracing.of(TracingSpec(otlp_endpoint="http://127.0.0.1:4318"), deployment="d", router="r")
