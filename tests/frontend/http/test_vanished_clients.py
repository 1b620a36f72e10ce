"""A client that vanishes without closing, such as on power loss, does not keep its concurrency slot."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from core.rpc import inference_pb2 as pb
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from tests.frontend.access.keys import access_with, issue
from tests.frontend.http.raw_http2 import RawHttp2
from tests.support import hosts
from tests.support.fake_token_service import FakeTokenService
from tests.support.hosts import Cable
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions
from tests.support.waiting import becomes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not hosts.can_be_made(), reason="needs root, to make network namespaces"),
]

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
    async with access.limits.entered(access.identify(_KNOWN.header)):
        pass


@pytest.mark.parametrize("is_written", [True, False], ids=["while it is written to", "in silence"])
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


@pytest.mark.parametrize("is_written", [True, False], ids=["while it is written to", "in silence"])
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
