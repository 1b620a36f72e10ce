"""A request is served beside two thousand connections that are silent or stop in the middle of a request."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from core.rpc import inference_pb2 as pb
from frontend.http.connections import GRPC_ENDPOINT
from tests.support.event_loops import on_both_loops
from tests.support.fake_token_service import FakeTokenService
from tests.support.serving import Serve, refusal, serving
from tests.support.tiny_service import MakeCompletions
from tests.support.waiting import becomes

_IDLE, _HALF_OPEN = 2000, 200
_HALF_A_REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le"
_HALF_A_PREFACE = b"PRI * HTTP/2.0\r\n"


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * (_IDLE + _HALF_OPEN)
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, and may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@asynccontextmanager
async def silent_connections(address: tuple[str, int], *, half: bytes) -> AsyncIterator[list[socket.socket]]:
    """Client and server are in this process."""
    async with AsyncExitStack() as stack:
        loop, ends = asyncio.get_running_loop(), []
        for number in range(_IDLE + _HALF_OPEN):
            end = stack.enter_context(socket.socket())
            ends.append(end)
            end.setblocking(False)
            await loop.sock_connect(end, address)
            if number >= _IDLE:
                await loop.sock_sendall(end, half)
        yield ends


@on_both_loops
async def test_http_request_is_served_beside_idle_connections(completions: MakeCompletions) -> None:
    async with serving(completions()) as served, silent_connections(served.address, half=_HALF_A_REQUEST):
        answer = await served.client.completions.create(model="tiny", prompt="abc", max_tokens=4)
        assert answer.choices[0].text == "abca"


async def test_grpc_request_is_served_beside_idle_connections(serve: Serve) -> None:
    served = await serve()
    asked = pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=4))
    async with silent_connections(("127.0.0.1", served.api.port), half=_HALF_A_PREFACE):
        events = await served.generate(asked, timeout=60)
    assert "".join(event.delta.text for event in events) == "abca"


async def test_too_large_grpc_header_is_rejected(serve: Serve) -> None:
    stub = (await serve()).stub
    refused = await refusal(stub.ListModels(pb.ListModelsRequest(), metadata=(("x", "y" * 20_000),), timeout=30))
    assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await stub.ListModels(pb.ListModelsRequest(), timeout=30)).models[0].id == "tiny"


async def test_streams_per_connection_are_limited(serve: Serve) -> None:
    """gRPC either queues further streams at the client or rejects them."""
    served = await serve(token_service=FakeTokenService(hang_after=0), grpc_limits=replace(GRPC_ENDPOINT, streams=3))
    asked = pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=1))

    async def ask() -> grpc.StatusCode | None:
        try:
            return None if await served.generate(asked) else grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            return error.code()

    running = [asyncio.ensure_future(ask()) for _ in range(5)]
    await becomes(lambda: len(served.fake.started) == 3)
    with pytest.raises(grpc.aio.AioRpcError):
        await served.stub.ListModels(pb.ListModelsRequest(), timeout=0.5)
    assert len(served.fake.started) == 3
    served.fake.go_on.set()
    ends = await asyncio.gather(*running)
    assert ends.count(None) >= 3 and set(ends) <= {None, grpc.StatusCode.UNAVAILABLE}
