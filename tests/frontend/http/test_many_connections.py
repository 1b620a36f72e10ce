"""Requests are served beside two thousand silent connections, and in bursts of thousands of calls."""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from core.rpc import inference_pb2 as pb
from frontend.http.connections import GRPC_ENDPOINT
from tests.frontend.http.raw_http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RESET,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    header_block,
)
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


_NUM_CALLS = 3500  # gRPC's default drops some calls beyond 1,000 pending ones, and all beyond 3,000


def _burst() -> bytes:
    headers = header_block("/cluster.v1.Inference/Tokenize")
    message = pb.TokenizeRequest(prompt="a").SerializeToString()
    data = struct.pack(">BI", 0, len(message)) + message
    said = [PREFACE, frame(SETTINGS, 0, 0)]
    said.append(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 24)))
    for stream in range(1, 2 * _NUM_CALLS, 2):
        said += [frame(HEADERS, END_HEADERS, stream, headers), frame(DATA, END_STREAM, stream, data)]
    return b"".join([*said, frame(PING, 0, 0, bytes(8))])


class _Ends:
    """Collects the streams that have ended."""

    def __init__(self) -> None:
        self.answered: set[int] = set()
        self.cut_off: set[int] = set()
        self.has_seen_all = False  # it answered a ping sent after all calls
        self.replies = b""
        self._buffer = b""

    def take(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 9 and len(self._buffer) >= (end := 9 + int.from_bytes(self._buffer[:3], "big")):
            kind, flags, stream = self._buffer[3], self._buffer[4], int.from_bytes(self._buffer[5:9], "big")
            if kind == DATA:
                self.answered.add(stream)
            elif stream not in self.answered and (kind == RESET or (kind == HEADERS and flags & END_STREAM)):
                self.cut_off.add(stream)
            elif kind == SETTINGS and not flags & ACK:
                self.replies += frame(SETTINGS, ACK, 0)
            elif kind == PING:
                self.has_seen_all |= bool(flags & ACK)
                self.replies += b"" if flags & ACK else frame(PING, ACK, 0, self._buffer[9:end])
            self._buffer = self._buffer[end:]


async def test_no_call_of_a_burst_is_dropped(serve: Serve) -> None:
    port, ends = (await serve()).api.port, _Ends()
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(_burst())
        while not ends.has_seen_all:  # this thread runs the event loop, which is blocked meanwhile
            ends.take(connection.recv(1 << 16))
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            while len(ends.answered) + len(ends.cut_off) < _NUM_CALLS:
                replies, ends.replies = ends.replies, b""
                await loop.sock_sendall(connection, replies)
                ends.take(await loop.sock_recv(connection, 1 << 16))
    assert not ends.cut_off, f"{len(ends.cut_off)} of {_NUM_CALLS} were"
