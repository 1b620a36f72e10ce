"""gRPC calls whose request never arrives completely."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import islice
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from frontend.http.connections import GRPC_ENDPOINT
from tests.frontend.access.keys import IssuedKey, access_with, issue
from tests.support.serving import Serve, authorized

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_CHECK = "/grpc.health.v1.Health/Check"
_WATCH = "/grpc.health.v1.Health/Watch"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def begun(channel: grpc.aio.Channel, method: str, known: IssuedKey | None = None) -> Any:
    """Start a call with headers only."""
    return channel.stream_stream(method)(metadata=authorized(known))


def asked(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.parametrize("method", ["Generate", "ListModels"])
async def test_missing_key_is_rejected_on_the_headers_alone(serve: Serve, method: str) -> None:
    served = await serve(access=access_with(issue("acme")))
    call = begun(served.channel, f"/cluster.v1.Inference/{method}")
    assert await asyncio.wait_for(call.code(), 10) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "method", ["/cluster.v1.Inference/Generate", "/cluster.v1.Inference/ListModels", _CHECK, _WATCH]
)
async def test_request_that_never_comes_times_out(serve: Serve, method: str) -> None:
    known = issue("acme")
    served = await serve(access=access_with(known), grpc_limits=replace(GRPC_ENDPOINT, message_s=0.05))
    assert await asyncio.wait_for(begun(served.channel, method, known).code(), 10) is grpc.StatusCode.DEADLINE_EXCEEDED
    empty = begun(served.channel, method, known)
    await empty.done_writing()
    assert await asyncio.wait_for(empty.code(), 10) in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    assert b"google.rpc.ErrorInfo" in dict(await empty.trailing_metadata())["grpc-status-details-bin"]


async def test_streaming_call_without_messages_times_out(serve: Serve) -> None:
    known = issue("acme")
    served = await serve(access=access_with(known), grpc_limits=replace(GRPC_ENDPOINT, message_s=0.05))
    calls = [begun(served.channel, _REFLECTION, known)]
    calls.append(begun(served.channel, _REFLECTION, known))
    await calls[1].write(reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString())
    assert b"cluster.v1.Inference" in await calls[1].read()
    for call in calls:
        assert await asyncio.wait_for(call.code(), 10) is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_unfinished_health_checks_displace_only_each_other(serve: Serve) -> None:
    served = await serve(access=access_with(issue("acme")))
    calls = [begun(served.channel, (_CHECK, _WATCH)[i % 2]) for i in range(40)]
    ended = [asyncio.create_task(call.code()) for call in calls]
    codes = [await code for code in islice(asyncio.as_completed(ended, timeout=30), 24)]
    assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes  # otherwise they end after 10 s with DEADLINE_EXCEEDED
    assert (await health_pb2_grpc.HealthStub(served.channel).Check(asked(""), timeout=10)).status == _SERVING
    for call in calls:
        call.cancel()
    await asyncio.gather(*ended)


async def test_slow_or_vanished_watchers_do_not_delay_others(serve: Serve) -> None:
    served = await serve(access=access_with(issue("acme")))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.api.port}") as other_clients:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(asked(""))
        other = health_pb2_grpc.HealthStub(other_clients).Watch(asked(""))
        assert (await watch.read()).status == (await other.read()).status == _SERVING
        other.cancel()
        assert await other.code() is grpc.StatusCode.CANCELLED
        unread = [health_pb2_grpc.HealthStub(other_clients).Watch(asked("")) for _ in range(8)]
        again = health_pb2_grpc.HealthStub(other_clients).Watch(asked(""))
        assert (await again.read()).status == _SERVING
        for is_live in (False, True):
            served.api.set_health(is_live=is_live, is_ready=True)
            received = await asyncio.wait_for(watch.read(), 10)
            assert received.status == (_SERVING if is_live else _NOT_SERVING)
        for call in (watch, again, *unread):
            call.cancel()


async def test_unknown_service_names_keep_no_state(serve: Serve) -> None:
    served = await serve(access=access_with(issue("acme")))
    stub = health_pb2_grpc.HealthStub(served.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(asked("other"), timeout=10)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(asked("other"))
    assert (await asyncio.wait_for(watch.read(), 10)).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
