"""A cluster.v1.Inference that repeats what it was asked, word by word."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from cluster.rpc import inference_pb2 as pb
from cluster.rpc import inference_pb2_grpc as pb_grpc


class FakeInference(pb_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.authorizations: list[str | bytes | None] = []

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))
        if request.prompt == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "temperature: must not be negative")
        if request.prompt == "full":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "every replica is full")
        asked = request.prompt or request.chat.messages[-1].content
        for number, word in enumerate(asked.split(" ")):
            text = word if number == 0 else f" {word}"
            yield pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=[number]))
        yield pb.GenerateResponse(finished=pb.Finished(finish_reason="stop"))
        usage = pb.Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
        trace = pb.Trace(
            prefill_replica="prefill-0",
            decode_replica="decode-1",
            blocks_shipped=2,
            wire_bytes=1000,
            ttft_ms=12.5,
            itl_ms=3.5,
            attempts=1,
        )
        yield pb.GenerateResponse(summary=pb.Summary(request_id="r-1", usage=usage, trace=trace))


@contextmanager
def serving() -> Iterator[tuple[FakeInference, str]]:
    """The servicer and its endpoint."""
    servicer = FakeInference()
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(5)
