"""What one connection, or many, may hold of an HTTP listener; on both event loops."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from core.types.errors import DeployError
from frontend.http.connections import HTTP_ENDPOINT, ConnectionLimits
from frontend.http.http_listener import HttpListener
from tests.support.event_loops import on_both_loops
from tests.support.waiting import WITHIN_S, becomes

_GET = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"


_LARGE = 160_000


class FakeApp:
    """Answers with the path; /wait at `go_on`, /large with _LARGE bytes at once, /much with 8 MB in parts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.asked.append(path)
        try:
            if path == "/wait":
                await self.go_on.wait()
            parts = 128 if path == "/much" else 1
            part = {"/much": b"x" * 65_536, "/large": b"x" * _LARGE}.get(path, path.encode())
            size = b"%d" % (parts * len(part))
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
            for number in range(parts):
                await send({"type": "http.response.body", "body": part, "more_body": number + 1 < parts})
        finally:
            self.ended.append(path)


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[bytes, bytes]:
        """Header and body."""
        header = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WITHIN_S)).lower()
        size = int(header.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return header, await asyncio.wait_for(self.reader.readexactly(size), WITHIN_S)

    async def rest(self) -> bytes:
        """All that comes until the end."""
        try:
            return await asyncio.wait_for(self.reader.read(), WITHIN_S)
        except ConnectionResetError:
            return b""


class Endpoint:
    def __init__(self, app: FakeApp, listener: HttpListener) -> None:
        self.app = app
        self.listener = listener
        self.clients: list[Client] = []

    async def connect(self, *sent: bytes, limit: int = 2**16) -> Client:
        self.clients.append(Client(*await asyncio.open_connection(*self.listener.address, limit=limit)))
        for data in sent:
            self.clients[-1].send(data)
        return self.clients[-1]


@asynccontextmanager
async def open_endpoint(**limits: Any) -> AsyncIterator[Endpoint]:
    unread_s = limits.pop("max_unread_s", 60.0)
    listening = HttpListener.open(
        app := FakeApp(), host="127.0.0.1", port=0, limits=replace(HTTP_ENDPOINT, **limits), max_unread_s=unread_s
    )
    endpoint = Endpoint(app, await listening)
    try:
        yield endpoint
    finally:
        await endpoint.listener.close(grace_s=0)
        for client in endpoint.clients:
            client.writer.close()
    assert sorted(app.asked) == sorted(app.ended), "nothing is left running"


# ---- headers


@pytest.mark.parametrize(
    "header",
    [
        b"GET / HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"y" * 20_000,
        b"GET /" + b"y" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n",
    ],
    ids=["a value", "without end", "a path", "many"],
)
@on_both_loops
async def test_a_header_that_is_too_large_is_refused(header: bytes) -> None:
    async with open_endpoint() as endpoint:
        said, body = await (client := await endpoint.connect(header)).answer()
        assert said.startswith(b"http/1.1 431 ") and b"connection: close" in said
        assert json.loads(body)["error"]["code"] == "request_header_fields_too_large"
        assert await client.rest() == b"" and not endpoint.app.asked


@on_both_loops
async def test_a_trailer_without_end_is_not_kept() -> None:
    async with open_endpoint() as endpoint:
        client = await endpoint.connect(b"POST /wait HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ")
        await becomes(lambda: endpoint.app.asked)
        for _ in range(100):
            if not client.writer.is_closing():
                client.send(b"y" * 1000)
            await asyncio.sleep(0)
        assert await client.rest() == b""
        endpoint.app.go_on.set()


@on_both_loops
async def test_one_that_is_just_small_enough_is_taken_with_a_large_body_behind_it() -> None:
    async with open_endpoint() as endpoint:
        header = (
            b"POST /ok HTTP/1.1\r\n" + b"x: y\r\n" * 97 + b"z: " + b"z" * 15_000 + b"\r\ncontent-length: 100000\r\n"
        )
        client = await endpoint.connect(header + b"\r\n" + b" " * 100_000)
        assert (await client.answer())[1] == b"/ok"


@on_both_loops
async def test_what_is_no_http_is_told_so_and_ended() -> None:
    async with open_endpoint() as endpoint:
        client = await endpoint.connect(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        said, body = await client.answer()
        assert said.startswith(b"http/1.1 400 ") and json.loads(body)["error"]["code"] == "bad_request"
        assert await client.rest() == b""


# ---- time


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET / HTTP/1.1\r\nho"], ids=["nothing", "empty lines", "half"])
@on_both_loops
async def test_a_header_that_never_comes_is_not_waited_for(sent: bytes) -> None:
    async with open_endpoint(open_s=0.1) as endpoint:
        client = await endpoint.connect(sent)
        for _ in range(3):
            client.send(sent[:1])  # that something comes is not enough
        assert await client.rest() == b"" and not endpoint.app.asked


@on_both_loops
async def test_a_connection_between_two_requests_ends_after_a_while_and_a_busy_one_does_not() -> None:
    async with open_endpoint(open_s=0.1, idle_s=0.1) as endpoint:
        busy = await endpoint.connect(_GET % b"wait")
        await becomes(lambda: endpoint.app.asked)
        idle = await endpoint.connect(_GET % b"a")
        assert (await idle.answer())[1] == b"/a"
        assert await idle.rest() == b""
        endpoint.app.go_on.set()
        assert (await busy.answer())[1] == b"/wait"


@on_both_loops
async def test_who_answers_early_does_not_wait_for_the_rest_of_a_body() -> None:
    async with open_endpoint(open_s=0.1) as endpoint:
        client = await endpoint.connect(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        assert (await client.answer())[1] == b"/a"
        client.send(b" ")
        assert await client.rest() == b""


@on_both_loops
async def test_an_old_connection_ends_with_what_is_under_way() -> None:
    async with open_endpoint(age_s=0) as endpoint:
        header, body = await (client := await endpoint.connect(_GET % b"a")).answer()
        assert b"connection: close" in header and body == b"/a" and await client.rest() == b""
    async with open_endpoint() as endpoint:
        header, _ = await (client := await endpoint.connect(_GET % b"a")).answer()
        assert b"connection: close" not in header
        client.send(_GET % b"b")
        assert (await client.answer())[1] == b"/b"


# ---- how many


@on_both_loops
async def test_where_there_are_too_many_the_one_ends_that_has_waited_longest() -> None:
    async with open_endpoint(connections=3) as endpoint:
        busy = await endpoint.connect(_GET % b"wait")
        first = await endpoint.connect(_GET % b"a")
        assert await first.answer()
        silent = await endpoint.connect()
        first.send(_GET % b"b")
        assert (await first.answer())[1] == b"/b", "now the silent one has waited longer"
        last = await endpoint.connect(_GET % b"c")
        assert await silent.rest() == b"" and (await last.answer())[1] == b"/c"
        first.send(_GET % b"d")
        assert (await first.answer())[1] == b"/d"
        endpoint.app.go_on.set()
        assert (await busy.answer())[1] == b"/wait"


@on_both_loops
async def test_requests_behind_each_other_are_answered_in_turn_and_not_too_many() -> None:
    async with open_endpoint(pipelined=2) as endpoint:
        client = await endpoint.connect(_GET % b"a" + _GET % b"b" + _GET % b"c")
        assert [(await client.answer())[1] for _ in range(3)] == [b"/a", b"/b", b"/c"]
        flood = await endpoint.connect(_GET % b"wait" + _GET % b"flood" * 1000)
        assert await flood.rest() == b""
        endpoint.app.go_on.set()
        assert "/flood" not in endpoint.app.asked


# ---- who does not read


@on_both_loops
async def test_an_answer_that_nobody_takes_is_paused_and_then_cut_off() -> None:
    async with open_endpoint(max_unread_s=0.1) as endpoint:
        client = await endpoint.connect(_GET % b"much", limit=1024)
        await becomes(lambda: endpoint.app.ended)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.answer()


@on_both_loops
async def test_who_leaves_the_end_of_an_answer_unread_is_not_waited_for() -> None:
    async with open_endpoint(max_unread_s=0.1, idle_s=0.1) as endpoint:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(endpoint.listener.address)
            client.sendall(_GET % b"large")
            await becomes(lambda: endpoint.app.ended)
            await endpoint.listener.close(grace_s=2 * WITHIN_S)
            assert sum(map(len, iter(lambda: _received(client), b""))) < _LARGE


# ---- the end


@on_both_loops
async def test_closing_ends_who_waits_and_lets_a_request_finish() -> None:
    async with open_endpoint() as endpoint:
        silent = await endpoint.connect()
        busy = await endpoint.connect(_GET % b"wait")
        await becomes(lambda: endpoint.app.asked)
        closing = asyncio.ensure_future(endpoint.listener.close(grace_s=WITHIN_S))
        assert await silent.rest() == b""
        with pytest.raises(ConnectionError):
            await endpoint.connect()
        assert not closing.done()
        endpoint.app.go_on.set()
        header, body = await busy.answer()
        assert b"connection: close" in header and body == b"/wait"
        await closing


@on_both_loops
async def test_closing_cuts_off_what_takes_too_long() -> None:
    async with open_endpoint() as endpoint:
        busy = await endpoint.connect(_GET % b"wait")
        await becomes(lambda: endpoint.app.asked)
        await endpoint.listener.close(grace_s=0.05)
        assert await busy.rest() == b"" and endpoint.app.ended == ["/wait"]


# ---- the port


@on_both_loops
async def test_several_listen_on_one_port_and_one_goes_on_when_the_other_ends() -> None:
    limits: ConnectionLimits = HTTP_ENDPOINT
    first = await HttpListener.open(one := FakeApp(), host="127.0.0.1", port=0, limits=limits, is_port_shared=True)
    port = first.address[1]
    second = await HttpListener.open(two := FakeApp(), host="127.0.0.1", port=port, limits=limits, is_port_shared=True)

    async def ask() -> None:
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        client.send(_GET % b"a")
        assert (await client.answer())[1] == b"/a"
        client.writer.close()

    while not (one.asked and two.asked):
        await ask()
    await first.close(grace_s=5)
    before = len(two.asked)
    for _ in range(8):
        await ask()
    assert len(two.asked) == before + 8
    await second.close(grace_s=5)


@on_both_loops
async def test_a_port_in_use_is_one_line() -> None:
    async with open_endpoint() as endpoint:
        port = endpoint.listener.address[1]
        with pytest.raises(DeployError, match=rf"HTTP port 127.0.0.1:{port} cannot be opened; is it in use\?"):
            await HttpListener.open(FakeApp(), host="127.0.0.1", port=port, limits=HTTP_ENDPOINT)


def _received(client: socket.socket) -> bytes:
    try:
        return client.recv(65_536)
    except ConnectionResetError:
        return b""
