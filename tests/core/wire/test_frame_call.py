"""The call that brings token frames, at gRPC's server; and at others, that say what it never does."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
from grpc import aio

from core.identity.authority import Authority
from core.identity.credentials import Identity
from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.errors import CapacityError, ReplicaLost, RequestError
from core.types.request import SampledToken
from core.wire.call_errors import abort_with
from core.wire.channel import listen, make_server
from core.wire.frame_call import FrameCall
from core.wire.frame_connection import FrameConnection
from core.wire.frames import FrameHub, WorkerServicer
from core.wire.plain_headers import plain_headers
from tests.support.event_loops import on_both_loops
from tests.support.identities import DEPLOYMENT, in_clear, proven, rank, router
from tests.support.waiting import becomes

_CALLEE, _CALLER = rank("decode-0"), router()
_S = 20.0
_Context: TypeAlias = aio.ServicerContext[Any, Any]
_BOUNDS: dict[str, Any] = {"max_message_bytes": 100_000, "quiet_s": 10.0}


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.num_unsent = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def abort(self) -> None:
        pass


class _Servicer(rpc.WorkerServicer):
    """Sends what it is given."""

    def __init__(self, *frames: pb.Frame) -> None:
        self._frames = frames

    async def Frames(self, request: pb.FramesRequest, context: _Context) -> AsyncIterator[pb.Frame]:
        for frame in self._frames:
            yield frame


@asynccontextmanager
async def _serving(servicer: rpc.WorkerServicer, identity: Identity) -> AsyncIterator[str]:
    server = make_server(identity)
    rpc.add_WorkerServicer_to_server(servicer, server)
    port = listen(server, "127.0.0.1:0", identity)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@asynccontextmanager
async def _saying(said: bytes, *, listens: bool = True) -> AsyncIterator[tuple[str, asyncio.StreamReader]]:
    """A server that says that, whatever it is asked; and what it hears until it is left."""
    heard, answering = asyncio.StreamReader(), asyncio.Event()
    answering.set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.clear()
        writer.write(said)
        with suppress(ConnectionError):
            if not listens:
                await writer.drain()
            while data := await reader.read(65_536):
                heard.feed_data(data)
        heard.feed_eof()
        writer.close()
        answering.set()

    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    async with await asyncio.start_server(answer, sock=listening) as server:
        yield f"127.0.0.1:{listening.getsockname()[1]}", heard
        server.close()
        await asyncio.wait_for(answering.wait(), _S)


async def _next(frames: FrameCall) -> pb.Frame:
    return await asyncio.wait_for(anext(frames), _S)


def _call(address: str, identity: Identity | None = None, **options: Any) -> FrameCall:
    return FrameCall(address, peer=_CALLEE, identity=identity or in_clear(_CALLER), **options)


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def _message(size: int, *, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, size)


@on_both_loops
async def test_it_brings_what_a_hub_publishes() -> None:
    hub = FrameHub()
    async with _serving(WorkerServicer(hub), in_clear(_CALLEE)) as address:
        frames = _call(address)
        assert (await _next(frames)).number == 0
        for number in range(1, 4):
            hub.publish({_CALLER.router: [(number, SampledToken(7))]})
            frame = await _next(frames)
            assert (frame.number, [*frame.plain_streams], [*frame.plain_token_ids]) == (number, [number], [7])
        hub.close()
        async with asyncio.timeout(_S):
            # What was next; unless the worker had not yet heard that the last one is sent.
            assert [frame.number async for frame in frames] in ([4], [])
        with pytest.raises(StopAsyncIteration):  # and again
            await _next(frames)


@on_both_loops
async def test_it_shows_papers_and_asks_for_them() -> None:
    authority = Authority.create(DEPLOYMENT)
    async with _serving(WorkerServicer(FrameHub()), proven(authority, _CALLEE)) as address:
        frames = _call(address, proven(authority, _CALLER))
        assert (await _next(frames)).number == 0
        frames.cancel()
        for pending_peer, why in (
            (proven(authority, router(deployment="neighbour")), "PERMISSION_DENIED"),
            (proven(Authority.create(DEPLOYMENT), _CALLER), "UNAVAILABLE"),
            (in_clear(_CALLER), "UNAVAILABLE"),
        ):
            with pytest.raises(ReplicaLost, match=f"decode-0: {why}"):
                await _next(_call(address, pending_peer))


async def test_it_speaks_to_nobody_else_at_that_address() -> None:
    authority = Authority.create(DEPLOYMENT)
    async with _serving(WorkerServicer(FrameHub()), proven(authority, rank("decode-1"))) as address:
        with pytest.raises(ReplicaLost, match=r"UNAVAILABLE.*match"):
            await _next(_call(address, proven(authority, _CALLER)))


async def test_papers_that_cannot_be_shown() -> None:
    identity = proven(Authority.create(DEPLOYMENT), _CALLER)
    assert identity.tls_credentials
    identity.renew(replace(identity.tls_credentials, key=b"no key"))
    async with _serving(WorkerServicer(FrameHub()), in_clear(_CALLEE)) as address:
        with pytest.raises(ReplicaLost, match="UNAVAILABLE: no connection"):
            await _next(_call(address, identity))


async def test_an_error_of_the_worker_is_the_same_here() -> None:
    class Refusing(rpc.WorkerServicer):
        async def Frames(self, request: pb.FramesRequest, context: _Context) -> AsyncIterator[pb.Frame]:
            await abort_with(context, CapacityError("für 7 % zu viele", retry_after_s=7.0))
            yield pb.Frame()

    async with _serving(Refusing(), in_clear(_CALLEE)) as address:
        with pytest.raises(CapacityError, match="für 7 % zu viele") as caught:
            await _next(_call(address))
        assert caught.value.retry_after_s == 7.0
    async with _serving(WorkerServicer(FrameHub()), in_clear(_CALLEE)) as address:
        with pytest.raises(RequestError, match="router"):
            await _next(_call(address, in_clear(router(1025 * "r"))))


async def test_nobody_there() -> None:
    async with _saying(b"") as (address, _):
        pass
    with pytest.raises(ReplicaLost, match="UNAVAILABLE: no connection"):
        await _next(_call(address))


async def test_a_message_may_be_larger_than_the_window() -> None:
    large = pb.Frame(streams=[pb.StreamTokens(stream=stream) for stream in range(1 << 40, (1 << 40) + 400_000)])
    assert large.ByteSize() > 3 << 20
    async with _serving(_Servicer(large, pb.Frame(number=1), large), in_clear(_CALLEE)) as address:
        frames = _call(address)
        assert [(await _next(frames)).ByteSize() for _ in range(3)] == [large.ByteSize(), 2, large.ByteSize()]


def _whole(message: bytes) -> bytes:
    return _frame(0, 0, 1, _message(len(message)) + message)


async def test_what_comes_by_itself_while_one_waits_goes_straight() -> None:
    taken: list[bytes] = []
    connection = FrameConnection("/", b"", scheme="", authority="", **_BOUNDS, straight=taken.append)
    connection.connection_made(FakeTransport())
    connection.data_received(_whole(b"early"))
    assert await connection.message() == b"early"
    waiting = asyncio.ensure_future(connection.message())
    await asyncio.sleep(0)
    connection.data_received(_whole(b"one"))
    connection.data_received(_whole(b""))
    connection.data_received(_frame(6, 0, 0, bytes(8)))
    connection.data_received(_whole(b"two"))
    assert taken == [b"one", b"", b"two"] and not waiting.done()
    connection.data_received(_whole(b"three") + _whole(b"four"))
    connection.data_received(_whole(b"five"))
    assert await waiting == b"three"
    assert [await connection.message(), await connection.message()] == [b"four", b"five"]
    for first in range(1, 14 + 5):  # in two parts
        waiting = asyncio.ensure_future(connection.message())
        await asyncio.sleep(0)
        connection.data_received(_whole(b"seven")[:first])
        connection.data_received(_whole(b"seven")[first:])
        assert await waiting == b"seven"
    assert len(taken) == 3
    connection.end("")


async def test_windows_are_returned_for_what_goes_straight() -> None:
    taken: list[bytes] = []
    connection = FrameConnection("/", b"", scheme="", authority="", **_BOUNDS, straight=taken.append)
    connection.connection_made(transport := FakeTransport())
    waiting = asyncio.ensure_future(connection.message())
    await asyncio.sleep(0)
    transport.written.clear()
    for _ in range(400):
        connection.data_received(_whole(bytes(9_995)))
    assert len(taken) == 400 and len(transport.written) == 2 * (400 * 10_000 // (1 << 19))
    connection.end("")
    assert await waiting is None


async def test_what_a_taker_raises_ends_the_call_and_is_raised_to_whoever_iterates() -> None:
    def reject(frame: pb.Frame) -> None:
        raise ZeroDivisionError

    hub = FrameHub()
    async with _serving(WorkerServicer(hub), in_clear(_CALLEE)) as address:
        with pytest.raises(ZeroDivisionError):
            async for _ in (frames := _call(address, taker=reject)):
                hub.publish({_CALLER.router: [(1, SampledToken(7))]})
        with pytest.raises(ReplicaLost, match="could not be taken"):
            await _next(frames)


async def test_who_does_not_take_is_not_sent_more_than_the_window() -> None:
    connection, transport = FrameConnection("/", b"", scheme="", authority="", **_BOUNDS), FakeTransport()
    connection.connection_made(transport)
    transport.written.clear()
    connection.data_received(60 * _frame(0, 0, 1, _message(9_995) + bytes(9_995)))
    for _ in range(59):
        assert len(await connection.message() or b"") == 9_995
        assert not transport.written
    await connection.message()
    returned = struct.pack(">I", 600_000)
    assert transport.written == [_frame(8, 0, 0, returned), _frame(8, 0, 1, returned)]
    connection.end("")


async def test_a_worker_that_ends_ends_it() -> None:
    async with _serving(WorkerServicer(FrameHub()), in_clear(_CALLEE)) as address:
        frames = _call(address)
        await _next(frames)
    with pytest.raises(ReplicaLost, match="decode-0"):
        await _next(frames)


async def test_who_is_cancelled_leaves_at_once() -> None:
    async with _saying(b"") as (address, heard):
        frames = _call(address)
        waiting = asyncio.ensure_future(anext(frames))
        assert b"/Frames" in await asyncio.wait_for(heard.readuntil(b"router-0"), _S)
        frames.cancel()
        frames.cancel()
        with pytest.raises(ReplicaLost, match="cancelled"):
            await asyncio.wait_for(waiting, _S)
        await asyncio.wait_for(heard.read(), _S)
    early = _call(address)
    early.cancel()
    with pytest.raises(ReplicaLost, match="cancelled"):
        await _next(early)


async def _connected(address: str, *, quiet_s: float = 10.0) -> FrameConnection:
    connection = FrameConnection("/x.X/X", b"", scheme="http", authority="x", **_BOUNDS | {"quiet_s": quiet_s})
    host, port = address.split(":")
    await asyncio.get_running_loop().create_connection(lambda: connection, host, int(port))
    return connection


async def test_who_says_nothing_is_asked_and_then_given_up() -> None:
    async with _saying(b"") as (address, heard):
        connection = await _connected(address, quiet_s=0.05)
        assert await asyncio.wait_for(connection.message(), _S) is None
        assert connection.lost == "silent for 0.15 s"
        assert (await asyncio.wait_for(heard.read(), _S)).endswith(2 * _frame(6, 0, 0, bytes(8)))


async def test_who_sends_more_than_the_window_is_given_up() -> None:
    async with _saying(200 * _frame(0, 0, 1, _message(10_000) + bytes(10_000))) as (address, _):
        connection = await _connected(address)
        await becomes(lambda: connection.is_over)
        assert "more than its window" in connection.lost


async def test_who_asks_and_does_not_listen_is_given_up() -> None:
    connection, transport = FrameConnection("/", b"", scheme="", authority="", **_BOUNDS), FakeTransport()
    connection.connection_made(transport)
    transport.num_unsent = 65_537
    connection.data_received(_frame(6, 0, 0, b"12345678"))
    assert connection.is_over and "does not read the answers" in connection.lost


@pytest.mark.parametrize(
    "idle", [_frame(6, 0, 0, bytes(8)), _frame(6, 1, 0, bytes(8)), _frame(4, 0, 0), _frame(0, 0, 1), _frame(99, 0, 5)]
)
async def test_who_says_nothing_in_many_words_is_given_up(idle: bytes) -> None:
    """Each of them costs the loop that serves all replicas."""
    async with _saying(100_000 * idle, listens=False) as (address, _):
        connection = await _connected(address)
        await becomes(lambda: connection.is_over)
        assert "frames that bring nothing" in connection.lost


async def test_many_messages_do_not_keep_others_from_their_turn() -> None:
    connection = FrameConnection("/", b"", scheme="", authority="", **_BOUNDS)
    connection.connection_made(FakeTransport())
    connection.data_received(60 * _frame(0, 0, 1, 3000 * _message(0)))
    num_taken, turns = 0, list[int]()

    async def take() -> None:
        nonlocal num_taken
        while num_taken < 10_000:
            assert await connection.message() == b""
            num_taken += 1

    taking = asyncio.ensure_future(take())
    while not taking.done():
        await asyncio.sleep(0)
        turns.append(num_taken)
    assert max(after - before for before, after in pairwise(turns)) < 100
    connection.end("")


async def test_pings_and_settings_are_answered() -> None:
    said = (
        _frame(4, 0, 0) + _frame(6, 0, 0, b"12345678") + _frame(4, 1, 0) + _frame(6, 1, 0, bytes(8)) + _frame(99, 7, 5)
    )
    message = pb.Frame(number=3).SerializeToString()
    said += _frame(0, 0, 1, (_message(len(message)) + message)[:3]) + _frame(
        0, 0, 1, (_message(len(message)) + message)[3:]
    )
    async with _saying(said) as (address, heard):
        frames = _call(address)
        assert (await _next(frames)).number == 3
        frames.cancel()
        assert (await asyncio.wait_for(heard.read(), _S)).endswith(_frame(4, 1, 0) + _frame(6, 1, 0, b"12345678"))


_NONSENSE: dict[str, Callable[[], bytes]] = {
    "a frame of 16385 bytes": lambda: _frame(0, 0, 1, bytes(16_385)),
    "a message of 67108865 bytes": lambda: _frame(0, 0, 1, _message((64 << 20) + 1)),
    "a message of 0 bytes, compressed": lambda: _frame(0, 0, 1, _message(0, flag=1)),
    "a call without a status": lambda: _frame(0, 1, 1),
    "a frame of stream 3": lambda: _frame(0, 0, 3),
    "with flags 8": lambda: _frame(0, 8, 1, b"\x01x\x00"),
    "headers that go on from none": lambda: _frame(9, 4, 1),
    "headers that do not go on": lambda: _frame(1, 0, 1) + _frame(6, 0, 0, bytes(8)),
    "too many headers": lambda: _frame(1, 0, 1) + 9 * _frame(9, 0, 1, bytes(8_000)),
    "a text is in Huffman's code": lambda: _frame(1, 5, 1, b"\x00\x81x\x01x"),
    "headers end in the middle": lambda: _frame(1, 5, 1, b"\x00\x01x"),
    "a push": lambda: _frame(5, 0, 1, bytes(8)),
    "the call was reset: 7": lambda: _frame(3, 0, 1, b"\x00\x00\x00\x07"),
    "a ping of another length": lambda: _frame(6, 0, 0, b"1234567"),
    "it sent what is no frame": lambda: _frame(0, 0, 1, _message(2) + b"\xff\xff"),
}


@pytest.mark.parametrize("taker", [None, lambda frame: None], ids=["iterated", "straight"])
@pytest.mark.parametrize("why", _NONSENSE)
async def test_nonsense_ends_it(why: str, taker: Callable[[pb.Frame], None] | None) -> None:
    async with _saying(_NONSENSE[why]()) as (address, _):
        frames = _call(address, taker=taker)
        with pytest.raises(ReplicaLost, match=f"UNAVAILABLE.*{why}"):
            while True:
                await _next(frames)


@pytest.mark.parametrize("said", [b"\x88", plain_headers([("grpc-status", 5000 * "9")])])
async def test_a_status_that_is_none(said: bytes) -> None:
    async with _saying(_frame(1, 5, 1, said)) as (address, _):
        with pytest.raises(ReplicaLost, match="UNKNOWN"):
            await _next(_call(address))


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:", "127.0.0.1:70000", 70 * "x" + ".example:1", "a\0b:1"])
async def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ReplicaLost, match="UNAVAILABLE: no connection"):
        await _next(_call(address))


async def test_papers_for_which_no_file_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", reject)
    async with _saying(b"") as (address, _):
        pass
    with pytest.raises(ReplicaLost, match=r"UNAVAILABLE: no connection.*Too many open files"):
        await _next(_call(address, proven(Authority.create(DEPLOYMENT), _CALLER)))


@on_both_loops
async def test_who_never_shows_papers_is_given_up() -> None:
    async with _saying(b"") as (address, heard):
        identity = proven(Authority.create(DEPLOYMENT), _CALLER)
        frames = _call(address, identity)
        assert await asyncio.wait_for(heard.read(1), _S)
        frames.cancel()
        await asyncio.wait_for(heard.read(), _S)  # its end
    async with _saying(b"") as (address, heard):
        with pytest.raises(ReplicaLost, match=r"UNAVAILABLE: no connection.*TimeoutError"):
            await _next(_call(address, identity, connects_within_s=0.05))
        await asyncio.wait_for(heard.read(), _S)


@on_both_loops
async def test_who_speaks_in_clear_where_papers_are_asked_for() -> None:
    async with _saying(_frame(4, 0, 0)) as (address, _):
        with pytest.raises(ReplicaLost, match="UNAVAILABLE: no connection"):
            await _next(_call(address, proven(Authority.create(DEPLOYMENT), _CALLER)))
