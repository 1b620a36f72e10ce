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
from core.rpc.inference_pb2_grpc import InferenceStub
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.http.connections import GRPC_ENDPOINT
from tests.support.event_loops import on_both_loops
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.sdk_clients import openai_client
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
    app = create_app(completions(FakeTokenService()), access=Access.anybody(), is_healthy=lambda: True)
    async with serve_http(app) as address, silent_connections(address, half=_HALF_A_REQUEST):
        assert await _ask(address) == "abca"


async def _ask(address: tuple[str, int]) -> str:
    url = "http://{}:{}/v1".format(*address)
    async with openai_client(base_url=url, api_key="none") as client:
        answer = await client.completions.create(model="tiny", prompt="abc", max_tokens=4)
    return answer.choices[0].text


async def test_grpc_request_is_served_beside_idle_connections(completions: MakeCompletions) -> None:
    service = completions(FakeTokenService())
    endpoint = await open_grpc_api(service, access=Access.anybody(), host="127.0.0.1", port=0)
    async with silent_connections(("127.0.0.1", endpoint.port), half=_HALF_A_PREFACE):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel:
            asked = pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=4))
            events = [event async for event in InferenceStub(channel).Generate(asked, timeout=60)]
    assert "".join(event.delta.text for event in events) == "abca"
    await endpoint.close(grace_s=0)


async def test_too_large_grpc_header_is_rejected(completions: MakeCompletions) -> None:
    endpoint = await open_grpc_api(completions(FakeTokenService()), access=Access.anybody(), host="127.0.0.1", port=0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel:
        stub = InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(pb.ListModelsRequest(), metadata=(("x", "y" * 20_000),), timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.ListModels(pb.ListModelsRequest(), timeout=30)).models[0].id == "tiny"
    await endpoint.close(grace_s=0)


async def test_streams_per_connection_are_limited(completions: MakeCompletions) -> None:
    """gRPC either queues further streams at the client or rejects them."""
    fake = FakeTokenService(hang_after=0)
    limits = replace(GRPC_ENDPOINT, streams=3)
    endpoint = await open_grpc_api(completions(fake), access=Access.anybody(), host="127.0.0.1", port=0, limits=limits)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel:
        stub = InferenceStub(channel)
        asked = pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=1))

        async def ask() -> grpc.StatusCode | None:
            try:
                return None if [event async for event in stub.Generate(asked)] else grpc.StatusCode.OK
            except grpc.aio.AioRpcError as error:
                return error.code()

        running = [asyncio.ensure_future(ask()) for _ in range(5)]
        await becomes(lambda: len(fake.started) == 3)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.ListModels(pb.ListModelsRequest(), timeout=0.5)
        assert len(fake.started) == 3
        fake.go_on.set()
        ends = await asyncio.gather(*running)
    assert ends.count(None) >= 3 and set(ends) <= {None, grpc.StatusCode.UNAVAILABLE}
    await endpoint.close(grace_s=0)
