"""Limits of the HTTP listener on real sockets, with both event loops."""

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
from frontend.http.connections import HTTP_ENDPOINT, HttpListener
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
    """Connection for one exchange."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[bytes, bytes]:
        """Read one response; return header and body."""
        header = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WITHIN_S)).lower()
        size = int(header.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return header, await asyncio.wait_for(self.reader.readexactly(size), WITHIN_S)

    async def rest(self) -> bytes:
        """Read until the end."""
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
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /?" + b"y" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 100 + b"\r\n",
    ],
    ids=["value", "path", "query", "number of fields"],
)
@on_both_loops
async def test_too_large_header_is_rejected_with_431(header: bytes) -> None:
    async with open_endpoint() as endpoint:
        status, body = await (client := await endpoint.connect(header)).answer()
        assert status.startswith(b"http/1.1 431 ") and b"connection: close" in status
        assert json.loads(body)["error"]["code"] == "request_header_fields_too_large"
        assert await client.rest() == b"" and not endpoint.app.asked


@on_both_loops
async def test_endless_header_is_rejected_with_400() -> None:
    async with open_endpoint() as endpoint:
        client = await endpoint.connect(b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000)
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ") and not endpoint.app.asked


@on_both_loops
async def test_endless_trailer_ends_the_connection() -> None:
    async with open_endpoint() as endpoint:
        client = await endpoint.connect(b"POST /wait HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ")
        await becomes(lambda: endpoint.app.asked)
        client.send(b"y" * 100_000)
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")
        endpoint.app.go_on.set()


@on_both_loops
async def test_header_within_the_limits_is_accepted_with_a_large_body() -> None:
    async with open_endpoint() as endpoint:
        header = b"POST /ok HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 97 + b"z: " + b"z" * 15_000
        client = await endpoint.connect(header + b"\r\ncontent-length: 100000\r\n\r\n" + b" " * 100_000)
        assert (await client.answer())[1] == b"/ok"


@on_both_loops
async def test_bytes_that_are_not_http_are_rejected_with_400() -> None:
    async with open_endpoint() as endpoint:
        client = await endpoint.connect(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")


# ---- connections


@on_both_loops
async def test_idle_connection_ends_and_busy_connection_stays() -> None:
    async with open_endpoint(idle_s=0.1) as endpoint:
        busy = await endpoint.connect(_GET % b"wait")
        await becomes(lambda: endpoint.app.asked)
        idle = await endpoint.connect(_GET % b"a")
        assert (await idle.answer())[1] == b"/a"
        assert await idle.rest() == b""
        endpoint.app.go_on.set()
        assert (await busy.answer())[1] == b"/wait"


@on_both_loops
async def test_early_answer_does_not_wait_for_the_rest_of_the_body() -> None:
    async with open_endpoint(idle_s=0.1) as endpoint:
        client = await endpoint.connect(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        assert (await client.answer())[1] == b"/a"
        assert await client.rest() == b""


@on_both_loops
async def test_request_beyond_the_number_of_connections_is_rejected_with_503() -> None:
    async with open_endpoint(connections=3) as endpoint:
        busy = await endpoint.connect(_GET % b"wait")
        await becomes(lambda: endpoint.app.asked)
        idle = await endpoint.connect(_GET % b"a")
        assert (await idle.answer())[1] == b"/a"
        status, _ = await (late := await endpoint.connect(_GET % b"b")).answer()
        assert status.startswith(b"http/1.1 503 ") and await late.rest() == b""
        assert "/b" not in endpoint.app.asked
        idle.send(_GET % b"c")
        assert (await idle.answer())[1] == b"/c", "the rejected connection has left"
        endpoint.app.go_on.set()
        assert (await busy.answer())[1] == b"/wait"


@on_both_loops
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with open_endpoint() as endpoint:
        client = await endpoint.connect(_GET % b"a" + _GET % b"b" + _GET % b"c")
        assert [(await client.answer())[1] for _ in range(3)] == [b"/a", b"/b", b"/c"]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs TCP_USER_TIMEOUT")
@pytest.mark.parametrize("path", ["much", "large"])
@on_both_loops
async def test_client_that_does_not_read_is_cut_off(path: str) -> None:
    """The kernel ends the connection while parts wait to be sent, and after the last part."""
    async with open_endpoint(max_unread_s=0.1) as endpoint:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(endpoint.listener.address)
            client.sendall(_GET % path.encode())
            await becomes(lambda: endpoint.app.ended)
            await endpoint.listener.close(grace_s=WITHIN_S)
            assert sum(map(len, iter(lambda: _received(client), b""))) < _LARGE


# ---- close


@on_both_loops
async def test_close_ends_idle_connections_and_finishes_requests() -> None:
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
        assert (await busy.answer())[1] == b"/wait" and await busy.rest() == b""
        await closing


@on_both_loops
async def test_close_cancels_requests_after_the_grace_time() -> None:
    async with open_endpoint() as endpoint:
        busy = await endpoint.connect(_GET % b"wait")
        await becomes(lambda: endpoint.app.asked)
        await endpoint.listener.close(grace_s=0)
        assert endpoint.app.ended == ["/wait"]
        assert (await busy.rest()).startswith(b"HTTP/1.1 500 "), "nothing of the answer had been sent"


# ---- the port


@on_both_loops
async def test_listeners_share_a_port() -> None:
    one, two = FakeApp(), FakeApp()
    first = await HttpListener.open(one, host="127.0.0.1", port=0, limits=HTTP_ENDPOINT, is_port_shared=True)
    port = first.address[1]
    second = await HttpListener.open(two, host="127.0.0.1", port=port, limits=HTTP_ENDPOINT, is_port_shared=True)

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
async def test_port_in_use_is_a_deploy_error() -> None:
    async with open_endpoint() as endpoint:
        port = endpoint.listener.address[1]
        with pytest.raises(DeployError, match=rf"HTTP port 127.0.0.1:{port} cannot be opened; it is in use"):
            await HttpListener.open(FakeApp(), host="127.0.0.1", port=port, limits=HTTP_ENDPOINT)


def _received(client: socket.socket) -> bytes:
    try:
        return client.recv(65_536)
    except ConnectionResetError:
        return b""
