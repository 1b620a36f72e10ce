"""Fake server and client for every RPC between a deployment's processes, generated from proto/."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from core.identity.process_name import ProcessName
from core.rpc import transfer_pb2 as transfer
from core.rpc import worker_pb2 as worker

METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (worker.DESCRIPTOR, transfer.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}


class FakeServices:
    """Services that answer every RPC once and count the calls."""

    def __init__(self) -> None:
        self.served: Counter[str] = Counter()

    def register(self, server: aio.Server) -> None:
        server.add_generic_rpc_handlers((_Handlers(self.served),))


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, served: Counter[str]) -> None:
        self._served = served

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = METHODS.get(details.method)
        return method and self._handler(details.method, method)

    def _handler(self, name: str, method: MethodDescriptor) -> Any:
        reply = GetMessageClass(method.output_type)

        async def answer(request: Any, context: Any) -> Message:
            self._served[name] += 1
            return reply()

        async def stream(request: Any, context: Any) -> AsyncIterator[Message]:
            self._served[name] += 1
            yield reply()

        async def converse(requests: Any, context: Any) -> AsyncIterator[Message]:
            async for _ in requests:
                self._served[name] += 1
                yield reply()

        codec = {
            "request_deserializer": GetMessageClass(method.input_type).FromString,
            "response_serializer": reply.SerializeToString,
        }
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(converse, **codec)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, **codec)
        return grpc.unary_unary_rpc_method_handler(answer, **codec)


async def call(channel: Any, name: str, message: Message | None = None) -> grpc.StatusCode:
    """Make one call and return its status; OK once an answer starts. The default message is empty."""
    method = METHODS[name]
    message = message or GetMessageClass(method.input_type)()
    codec = {
        "request_serializer": GetMessageClass(method.input_type).SerializeToString,
        "response_deserializer": GetMessageClass(method.output_type).FromString,
    }
    try:
        if method.client_streaming:
            await anext(aiter(channel.stream_stream(name, **codec)(iter([message]), timeout=10)), None)
        elif method.server_streaming:
            await anext(aiter(channel.unary_stream(name, **codec)(message, timeout=10)), None)
        else:
            await channel.unary_unary(name, **codec)(message, timeout=10)
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def truthful(name: str, caller: ProcessName, callee: ProcessName) -> Message:
    """Return a first message that matches the certificate of `caller`."""
    handoff = worker.Handoff(replica=caller.group)
    is_own = caller.group == callee.group
    number = int(caller.member) if caller.member.isdecimal() else 0
    key = "gang/0" if is_own else f"{caller}>{callee.member}#1/f00/place"
    messages: dict[str, Message] = {
        "Generate": worker.GenerateRequest(router=caller.member),
        "Stop": worker.StopRequest(router=caller.member),
        "Migrate": worker.MigrateRequest(router=caller.member),
        "Fetch": worker.FetchRequest(handoff=handoff),
        "Connect": transfer.SenderFrame(hello=transfer.Hello(sender=str(caller), sender_rank=number)),
        "Report": transfer.ReportRequest(rank=number),
        "Tell": transfer.TellRequest(key=key),
        "Ask": transfer.AskRequest(key=key),
    }
    method = METHODS[name]
    return messages.get(method.name) or GetMessageClass(method.input_type)()
