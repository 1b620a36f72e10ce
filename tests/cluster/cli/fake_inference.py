"""A cluster.v1.Inference that echoes the prompt word by word."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from grpc_status import rpc_status

from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as pb_grpc
from core.types.errors import ReplicaLost
from core.types.network import format_address
from frontend.grpc.messages import status_of


class FakeInference(pb_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.authorizations: list[str | bytes | None] = []
        # Pauses after the first word.
        self.is_held = False
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))
        if request.prompt == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "temperature: must not be negative")
        if request.prompt == "full":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "every replica is full")
        if request.prompt == "lost":
            context.abort_with_status(rpc_status.to_status(status_of(ReplicaLost("no replica"))))
        prompt = request.prompt or request.chat.messages[-1].content
        for number, word in enumerate(prompt.split(" ")):
            text = word if number == 0 else f" {word}"
            yield pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=[number]))
            if self.is_held:
                self._released.wait(60)
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
def serving(host: str = "127.0.0.1") -> Iterator[tuple[FakeInference, str]]:
    """Yield the servicer and its endpoint."""
    servicer = FakeInference()
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port(format_address(host, 0))
    server.start()
    try:
        yield servicer, format_address(host, port)
    finally:
        servicer.release()
        server.stop(0).wait(5)
