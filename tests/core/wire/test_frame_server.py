"""Both ends of the token stream over real connections: authorization, and isolation from misbehaving peers."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from core.identity.authority import Authority
from core.identity.credentials import Identity
from core.rpc import worker_pb2 as pb
from core.types.errors import ReplicaLost
from core.types.request import SampledToken
from core.wire import frames
from core.wire.frames import FrameHub, FrameServer, follow_frames
from tests.support.event_loops import on_both_loops
from tests.support.identities import DEPLOYMENT, in_clear, proven, rank, router, tls_credentials
from tests.support.waiting import becomes

_CALLEE, _CALLER = rank("decode-0"), router()
_AUTHORITY = Authority.create(DEPLOYMENT)
_S = 20.0


class FakeHub(FrameHub):
    """Hub that sends exactly the given frames."""

    def __init__(self, *frames: pb.Frame) -> None:
        super().__init__()
        self._frames = frames

    async def frames(self, router: str) -> AsyncGenerator[pb.Frame, None]:
        for frame in self._frames:
            yield frame


class Following:
    """Router side: its frames one by one, and then its end."""

    def __init__(self, address: str, identity: Identity, **options: Any) -> None:
        self._frames: asyncio.Queue[pb.Frame] = asyncio.Queue()
        following = follow_frames(address, peer=_CALLEE, identity=identity, take=self._frames.put_nowait, **options)
        self.task = asyncio.ensure_future(following)

    async def next(self) -> pb.Frame:
        coming = asyncio.ensure_future(self._frames.get())
        await asyncio.wait({coming, self.task}, return_when=asyncio.FIRST_COMPLETED, timeout=_S)
        if not coming.done():
            coming.cancel()
            self.task.result()
        return await coming

    async def end(self) -> None:
        await asyncio.wait_for(self.task, _S)

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@asynccontextmanager
async def _serving(hub: FrameHub, identity: Identity | None = None, **options: Any) -> AsyncIterator[str]:
    server = FrameServer(hub, identity or in_clear(_CALLEE), **options)
    address = f"127.0.0.1:{server.start('127.0.0.1')}"
    try:
        yield address
    finally:
        await asyncio.wait_for(server.close(), _S)


@asynccontextmanager
async def _sending(sent: bytes) -> AsyncIterator[tuple[str, asyncio.StreamReader]]:
    """Run a server that sends `sent` to every client; yield its address and a reader of the bytes that it received."""
    received = asyncio.StreamReader()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                received.feed_data(data)
        received.feed_eof()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield "{}:{}".format(*server.sockets[0].getsockname()), received


@asynccontextmanager
async def _raw(address: str, *sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Open a connection and send these raw messages."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    for message in sent:
        writer.write(message)
    try:
        yield reader
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _dropped(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes received until the server closes the connection."""
    with suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), _S)
    return b""


def _coded(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def _request(name: str = _CALLER.router) -> bytes:
    return _coded(pb.FramesRequest(router=name).SerializeToString())


def _follow(address: str, identity: Identity | None = None, **options: Any) -> Following:
    return Following(address, identity or in_clear(_CALLER), **options)


@on_both_loops
@pytest.mark.parametrize("tls", [False, True], ids=["clear", "tls"])
async def test_frames_arrive_as_a_hub_publishes_them(tls: bool) -> None:
    authority, hub = Authority.create(DEPLOYMENT), FrameHub()
    callee, caller = (proven(authority, name) if tls else in_clear(name) for name in (_CALLEE, _CALLER))
    async with _serving(hub, callee) as address:
        following = _follow(address, caller)
        assert (await following.next()).number == 0
        for number in range(1, 4):
            hub.publish({_CALLER.router: [(number, SampledToken(7))]})
            frame = await following.next()
            assert (frame.number, [*frame.plain_streams], [*frame.plain_token_ids]) == (number, [number], [7])
        hub.close()
        await following.end()
        assert not hub.num_frames(_CALLER.router)


@on_both_loops
async def test_closed_hub_ends_the_stream() -> None:
    async with _serving(FrameHub()) as address:
        following = _follow(address)
        await following.next()
    with suppress(ReplicaLost):  # unless it was closed in order
        await following.end()


@on_both_loops
async def test_a_router_that_leaves_is_forgotten_at_once() -> None:
    hub = FrameHub()
    async with _serving(hub) as address:
        following = _follow(address)
        await following.next()
        await following.leave()
        await becomes(lambda: not hub.num_frames(_CALLER.router))


@on_both_loops
async def test_only_a_router_of_this_deployment_gets_frames() -> None:
    authority = Authority.create(DEPLOYMENT)
    rejected_callers = {
        "is not of this deployment": proven(authority, router(deployment="neighbour")),
        "is a rank of another replica": Identity(_CALLER, tls_credentials(authority, rank("decode-1"))),
        "no connection": proven(Authority.create(DEPLOYMENT), _CALLER),
        "alert|reset|closed": proven(authority, _CALLER, life_s=-1.0),
        "reset|closed": in_clear(_CALLER),
    }
    hub = FrameHub()
    async with _serving(hub, proven(authority, _CALLEE)) as address:
        for why, caller in rejected_callers.items():
            with pytest.raises(ReplicaLost, match=f"(?i)decode-0.*({why})"):
                await _follow(address, caller).end()
        assert not hub.num_frames(_CALLER.router)
        following = _follow(address, proven(authority, _CALLER))
        assert (await following.next()).number == 0
        await following.leave()


async def test_a_router_gets_no_frames_of_another() -> None:
    authority = Authority.create(DEPLOYMENT)
    async with _serving(FrameHub(), proven(authority, _CALLEE)) as address:
        liar = Identity(router("router-1"), tls_credentials(authority, _CALLER))
        with pytest.raises(ReplicaLost, match=r"decode-0: router/router-0 may not make this call for another process"):
            await _follow(address, liar).end()


@pytest.mark.parametrize(
    ("impostor", "reason"),
    [
        (proven(_AUTHORITY, rank("decode-1")), "match"),
        (proven(_AUTHORITY, rank("decode-0", 1)), "match"),
        (proven(_AUTHORITY, rank("decode-0", deployment="neighbour")), "match"),
        (proven(Authority.create(DEPLOYMENT), _CALLEE), "CERTIFICATE_VERIFY_FAILED"),
    ],
    ids=["another replica", "another rank", "another deployment", "another authority"],
)
async def test_router_accepts_only_the_expected_worker(impostor: Identity, reason: str) -> None:
    async with _serving(FrameHub(), impostor) as address:
        with pytest.raises(ReplicaLost, match=rf"decode-0: no connection.*{reason}"):
            await _follow(address, proven(_AUTHORITY, _CALLER)).end()


async def test_renewed_certificate_is_used_from_the_next_connection_on() -> None:
    """Even the authority changes. Open streams continue."""
    before, after = Authority.create(DEPLOYMENT), Authority.create(DEPLOYMENT)
    hub, server = FrameHub(), proven(before, _CALLEE)
    async with _serving(hub, server) as address:
        old = _follow(address, proven(before, _CALLER))
        await old.next()
        server.renew(tls_credentials(after, _CALLEE))
        with pytest.raises(ReplicaLost):
            await _follow(address, proven(before, router("router-1"))).end()
        new = _follow(address, proven(after, router("router-1")))
        assert (await new.next()).number == 0
        hub.publish({_CALLER.router: [(1, SampledToken(7))]})
        assert (await old.next()).number == 1
        await asyncio.gather(old.leave(), new.leave())


async def test_unusable_certificate_disturbs_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority.create(DEPLOYMENT)
    callee, caller = proven(authority, _CALLEE), proven(authority, _CALLER)
    assert callee.tls_credentials and caller.tls_credentials
    good, broken = caller.tls_credentials, replace(caller.tls_credentials, key=b"no key")
    async with _serving(FrameHub(), callee) as address:
        following = _follow(address, caller)
        await following.next()
        caller.renew(broken)
        with pytest.raises(ReplicaLost, match="no connection"):
            await _follow(address, caller).end()
        caller.renew(good)
        callee.renew(broken)
        with pytest.raises(ReplicaLost):
            await _follow(address, caller).end()
        callee.renew(tls_credentials(authority, _CALLEE))
        later = _follow(address, caller)
        assert (await later.next()).number == 0
        await asyncio.gather(following.leave(), later.leave())

        def reject(name: str) -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(os, "memfd_create", reject)
        with pytest.raises(ReplicaLost, match=r"no connection.*Too many open files"):
            await _follow(address, caller).end()


async def test_invalid_router_name_is_rejected_with_the_reason() -> None:
    async with _serving(FrameHub()) as address:
        with pytest.raises(ReplicaLost, match="decode-0: router"):
            await _follow(address, in_clear(router(1025 * "r"))).end()


async def test_too_many_routers_are_rejected_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_ROUTERS", 1)
    async with _serving(FrameHub()) as address:
        first = _follow(address)
        await first.next()
        with pytest.raises(ReplicaLost, match="decode-0: 1 routers are connected"):
            await _follow(address, in_clear(router("router-1"))).end()
        await first.leave()


async def test_second_stream_of_a_router_replaces_the_first() -> None:
    hub = FrameHub()
    async with _serving(hub) as address:
        first = _follow(address)
        await first.next()
        second = _follow(address)
        assert (await second.next()).number == 0
        await first.end()
        hub.publish({_CALLER.router: [(1, SampledToken(7))]})
        while not (await second.next()).plain_streams:
            pass
        await second.leave()


_MALFORMED = {
    "too long": struct.pack(">I", 4097),
    "HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "not protobuf": _coded(b"\xff\xff"),
    "TLS where there is none": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
}


@on_both_loops
@pytest.mark.parametrize(
    ("tls", "what"),
    # With TLS, the first would be the start of a record; the server waits for its end as in the next test.
    [case for case in product([False, True], _MALFORMED) if case != (True, "too long")],
)
async def test_a_malformed_peer_is_dropped_and_disturbs_no_other(what: str, tls: bool) -> None:
    authority, hub = Authority.create(DEPLOYMENT), FrameHub()
    callee, caller = (proven(authority, name) if tls else in_clear(name) for name in (_CALLEE, _CALLER))
    async with _serving(hub, callee, open_s=5.0) as address:
        following = _follow(address, caller)
        await following.next()
        async with _raw(address, _MALFORMED[what]) as reader:
            await _dropped(reader)
        hub.publish({_CALLER.router: [(1, SampledToken(7))]})
        while not (await following.next()).plain_streams:
            pass
        await following.leave()


@on_both_loops
@pytest.mark.parametrize("tls", [False, True], ids=["clear", "tls"])
async def test_a_peer_that_names_itself_too_late_is_dropped(tls: bool) -> None:
    identity = proven(Authority.create(DEPLOYMENT), _CALLEE) if tls else in_clear(_CALLEE)
    async with _serving(FrameHub(), identity, open_s=0.05) as address:
        for sent in (b"", b"\x00"):
            async with _raw(address, sent) as reader:
                assert await _dropped(reader) == b""


async def test_oldest_unnamed_connection_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_UNNAMED", 2)
    async with _serving(FrameHub()) as address:
        following = _follow(address)
        await following.next()
        async with _raw(address) as first, _raw(address), _raw(address):
            assert await _dropped(first) == b""
            async with _raw(address, _request("router-1")) as named:
                assert await asyncio.wait_for(named.read(4), _S)
        assert not following.task.done()
        await following.leave()


@pytest.mark.parametrize(("num_requests", "options"), [(1, {"look_s": 0.01}), (2, {})], ids=["silent", "says more"])
async def test_a_router_that_breaks_the_protocol_is_dropped(num_requests: int, options: dict[str, float]) -> None:
    hub = FrameHub()
    async with _serving(hub, **options) as address, _raw(address, *[_request()] * num_requests) as reader:
        await _dropped(reader)
        await becomes(lambda: not hub.num_frames(_CALLER.router))


async def test_a_router_that_reads_nothing_gets_larger_frames_slows_no_other_and_is_dropped() -> None:
    hub = FrameHub()
    async with _serving(hub, drain_s=0.2) as address:
        quick = _follow(address, in_clear(router("router-1")))
        await quick.next()
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        host, port = address.split(":")
        await asyncio.get_running_loop().sock_connect(slow, (host, int(port)))
        await asyncio.get_running_loop().sock_sendall(slow, _request())
        await becomes(lambda: hub.num_frames(_CALLER.router) == 2)
        some = [(stream, SampledToken(1 << 30)) for stream in range(1 << 40, (1 << 40) + 10_000)]
        num_steps = 0
        while hub.num_frames(_CALLER.router):  # until it is dropped
            hub.publish({_CALLER.router: some, "router-1": [(1, SampledToken(num_steps))]})
            num_steps += 1
            while not (frame := await quick.next()).plain_streams:
                pass
            assert [*frame.plain_token_ids] == [num_steps - 1]
        slow.close()
        await quick.leave()


async def test_a_frame_may_be_large() -> None:
    large = pb.Frame(streams=[pb.StreamTokens(stream=stream) for stream in range(1 << 40, (1 << 40) + 400_000)])
    assert large.ByteSize() > 3 << 20
    async with _serving(FakeHub(large, pb.Frame(number=1), large)) as address:
        following = _follow(address)
        assert [(await following.next()).ByteSize() for _ in range(3)] == [large.ByteSize(), 2, large.ByteSize()]
        await following.end()


async def test_exception_of_take_ends_the_stream_and_is_raised() -> None:
    def reject(frame: pb.Frame) -> None:
        raise ZeroDivisionError

    hub = FrameHub()
    async with _serving(hub) as address:
        with pytest.raises(ZeroDivisionError):
            await follow_frames(address, peer=_CALLEE, identity=in_clear(_CALLER), take=reject)
        await becomes(lambda: not hub.num_frames(_CALLER.router))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (struct.pack(">I", (64 << 20) + 1), "exceeds the limit"),
        (_coded(b"\xff\xff"), "DecodeError"),
        (_coded(pb.Frame(error="no").SerializeToString()), "decode-0: no"),
    ],
)
async def test_a_worker_that_sends_nonsense_is_lost(sent: bytes, why: str) -> None:
    async with _sending(sent) as (address, _):
        with pytest.raises(ReplicaLost, match=why):
            await _follow(address).end()


async def test_a_router_names_itself_and_sends_keep_alives_until_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("core.wire.frames.PING_EVERY_S", 0.01)
    async with _sending(b"") as (address, received):
        following = _follow(address)
        expected = _request() + 3 * _coded(b"")
        assert await asyncio.wait_for(received.readexactly(len(expected)), _S) == expected
        await following.leave()
        await asyncio.wait_for(received.read(), _S)


@pytest.mark.parametrize(
    "address", ["nowhere", "127.0.0.1:", "127.0.0.1:70000", 70 * "x" + ".example:1", "a\0b:1", "127.0.0.1:1"]
)
async def test_invalid_or_unreachable_address_is_an_error(address: str) -> None:
    with pytest.raises(ReplicaLost, match="decode-0: no connection"):
        await _follow(address).end()


@on_both_loops
async def test_worker_without_a_handshake_times_out() -> None:
    identity = proven(Authority.create(DEPLOYMENT), _CALLER)
    async with _sending(b"") as (address, received):
        with pytest.raises(ReplicaLost, match=r"no connection.*TimeoutError"):
            await _follow(address, identity, connect_s=0.05).end()
        await asyncio.wait_for(received.read(), _S)
    async with _sending(bytes(8)) as (address, _):
        with pytest.raises(ReplicaLost, match="no connection"):
            await _follow(address, identity).end()
