"""Clients that stop reading or vanish hold bounded memory, and their slots, for a bounded time."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from tests.frontend.access.keys import access_with, issue
from tests.frontend.http.raw_http2 import RawHttp2
from tests.support import hosts
from tests.support.fake_token_service import FakeTokenService
from tests.support.hosts import Cable
from tests.support.http_server import serve_http
from tests.support.serving import Serve, Served
from tests.support.tiny_service import MakeCompletions, outcomes
from tests.support.waiting import becomes

_LIMIT_S = 0.3


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve(max_context=4096, max_unread_s=_LIMIT_S)


def _request(body: dict[str, Any]) -> bytes:
    content = json.dumps({"logprobs": 20, "stream": True, **body}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % len(content) + content


@pytest.mark.parametrize("prompt", ["abc", ["abc", "abc"]], ids=["one prompt", "two prompts"])
async def test_http_client_that_does_not_read_is_cut_off(served: Served, prompt: str | list[str]) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(served.address)
        client.sendall(_request({"prompt": prompt, "n": 64, "max_tokens": 4000}))
        await becomes(lambda: outcomes(served.service))
    if isinstance(prompt, str):
        assert outcomes(served.service) == {"client_too_slow": 1}
    assert len(served.fake.ended) == len(served.fake.started) and "completed" not in outcomes(served.service)
    assert served.fake.num_tokens < 64 * 4000, "it was paused before the end"


async def test_grpc_client_that_does_not_read_is_cut_off_with_a_reason(served: Served) -> None:
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.api.port}", options=options) as channel:
        sampling = pb.SamplingParams(n=64, max_tokens=4000, logprobs=20)
        call = InferenceStub(channel).Generate(pb.GenerateRequest(prompt="abc", sampling=sampling))
        await call.read()
        await asyncio.wait_for(served.fake.has_ended.wait(), 60)
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.ABORTED and "not read for" in await call.details()
    assert outcomes(served.service) == {"client_too_slow": 1} and served.fake.num_tokens < 64 * 4000


async def test_slow_reader_is_only_paused(served: Served) -> None:
    reader, writer = await asyncio.open_connection(*served.address, limit=4096)
    writer.write(_request({"prompt": "abc", "n": 16, "max_tokens": 200}))
    whole = bytearray()
    while part := await reader.read(65536):
        whole += part
        await asyncio.sleep(0)
    writer.close()
    assert whole.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and outcomes(served.service) == {"completed": 1}


_MARKS = (
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not hosts.can_be_made(), reason="needs root, to make network namespaces"),
    pytest.mark.parametrize("is_written", [True, False], ids=["while it is written to", "in silence"]),
)


def _vanishing(test: Any) -> Any:
    for mark in _MARKS:
        test = mark(test)
    return test


_KNOWN = issue("acme", concurrency=1)
_UNREAD_S = 1.0


@pytest.fixture
def cable() -> Iterator[Cable]:
    with hosts.cable() as made:
        yield made


@pytest.fixture
def fake() -> FakeTokenService:
    return FakeTokenService(hang_after=3)


@asynccontextmanager
async def far_connection(cable: Cable, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection from the far host to this one."""

    def connect() -> socket.socket:
        hosts.enter(cable.far.network)  # affects this thread's new sockets only
        return socket.create_connection((cable.near.address, port), 30)

    with ThreadPoolExecutor(1) as elsewhere:
        connected = await asyncio.get_running_loop().run_in_executor(elsewhere, connect)
    reader, writer = await asyncio.open_connection(sock=connected)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def write_on(fake: FakeTokenService) -> None:
    """Send a few tokens, then nothing."""
    fake.hang_after, old, fake.go_on = 6, fake.go_on, asyncio.Event()
    old.set()
    await becomes(lambda: fake.num_tokens == 6)


async def place_comes_back(fake: FakeTokenService, access: Access) -> None:
    await becomes(lambda: fake.ended)
    await access.limits.settled()
    async with access.limits.entered(access.identify(_KNOWN.header).key):
        pass


@_vanishing
async def test_vanished_http_client_returns_its_slot(
    completions: MakeCompletions, cable: Cable, fake: FakeTokenService, is_written: bool
) -> None:
    """Retransmissions alone would take 15 minutes; keepalive alone 100 s."""
    access = access_with(_KNOWN)
    app = create_app(service := completions(fake), access=access, is_healthy=lambda: True)
    body = json.dumps({"prompt": "abc", "max_tokens": 200, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {_KNOWN.header}\r\n"
    async with serve_http(app, host=cable.near.address, max_unread_s=_UNREAD_S) as (_, port):
        async with far_connection(cable, port) as (reader, writer):
            writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert b" 200 " in await reader.readline()
            await fake.is_hanging.wait()
            cable.mute()
            if is_written:
                await write_on(fake)
            await place_comes_back(fake, access)
    service.close()


@_vanishing
async def test_vanished_grpc_client_returns_its_slot(
    completions: MakeCompletions, cable: Cable, fake: FakeTokenService, is_written: bool
) -> None:
    access = access_with(_KNOWN)
    endpoint = await open_grpc_api(service := completions(fake), access=access, host=cable.near.address, port=0)
    asked = pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=200)).SerializeToString()
    async with far_connection(cable, endpoint.port) as (reader, writer):
        client = RawHttp2(reader, writer)
        await client.greet()
        data = b"\0" + len(asked).to_bytes(4, "big") + asked
        client.begin("/cluster.v1.Inference/Generate", authorization=_KNOWN.header, data=data)
        pumping = asyncio.create_task(client.pump_forever())
        await fake.is_hanging.wait()
        cable.mute()
        if is_written:
            await write_on(fake)
        await place_comes_back(fake, access)
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
    await endpoint.close(grace_s=0)
    service.close()
