"""Clients that send too much, send slowly, or disconnect: on raw sockets, and through ASGI messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from frontend.access.access import Access
from frontend.http.app import create_app
from frontend.text.completion_request import MAX_REQUEST_BYTES
from tests.support.event_loops import on_both_loops
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.serving import Serve, Served
from tests.support.tiny_service import MakeCompletions

BODIES = [{"prompt": "abc", "stream": True}, {"prompt": "abc"}, {"prompt": ["abc", "def"], "stream": True}]
IDS = ["stream", "whole", "many"]


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve()


@pytest.fixture
def fake(served: Served) -> FakeTokenService:
    return served.fake


@pytest.fixture
def address(served: Served) -> tuple[str, int]:
    return served.address


def http_post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)


async def exchange(address: tuple[str, int], sent: bytes) -> bytes:
    """Send this and read until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def within(seconds: float, event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), seconds)


# ---- responses


@pytest.mark.parametrize("body", BODIES, ids=IDS)
async def test_http_1_0_client_gets_the_same_answer_without_chunks(
    address: tuple[str, int], body: dict[str, Any]
) -> None:
    answers = []
    for version in (b"1.0", b"1.1"):
        asked = http_post(body).replace(b"HTTP/1.1\r\n", b"HTTP/%b\r\nconnection: close\r\n" % version)
        header, _, content = (await exchange(address, asked)).partition(b"\r\n\r\n")
        is_chunked = b"transfer-encoding: chunked" in header.lower()
        assert is_chunked == (version == b"1.1" and bool(body.get("stream")))
        assert b"connection: close" in header.lower()
        answers.append(_unchunked(content) if is_chunked else content)
    plain, usual = ([line.split(b'"choices"')[-1] for line in answer.splitlines()] for answer in answers)
    assert plain == usual  # except ids and times


async def test_http_1_0_head_of_a_page_has_no_body(address: tuple[str, int]) -> None:
    answer = await exchange(address, b"HEAD /health HTTP/1.0\r\n\r\nGET /health HTTP/1.0\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n")  # then the connection ended


def _unchunked(content: bytes) -> bytes:
    pieces = []
    while content:
        size, _, content = content.partition(b"\r\n")
        pieces.append(content[: int(size, 16)])
        content = content[int(size, 16) + 2 :]
    return b"".join(pieces)


@on_both_loops
async def test_accepted_connections_do_not_delay_small_writes() -> None:
    """Without TCP_NODELAY, the second write would wait up to 40 ms for the client to acknowledge the first."""
    async with serve_http(FastAPI()) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(reader.readline(), 10)
        accepted = _accepted(writer.get_extra_info("sockname"))
        assert [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in accepted] == [1]
        for one in accepted:
            one.close()
        writer.close()


def _accepted(client: tuple[str, int]) -> list[socket.socket]:
    """Duplicates of this process's sockets whose peer is `client`."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            one = socket.socket(fileno=os.dup(descriptor))
            with contextlib.suppress(OSError):
                if one.getpeername() == client:
                    found.append(one)
                    continue
            one.close()
    return found


# ---- another protocol


async def test_offer_of_another_protocol_is_ignored(address: tuple[str, int], fake: FakeTokenService) -> None:
    """Java's HTTP client offers h2c with its first request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    head, content = http_post(BODIES[1]).split(b"\r\n\r\n")
    for parts in ([head + b"\r\n" + offer + b"\r\n" + content], [head + b"\r\n" + offer + b"\r\n", content]):
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            for part in parts:
                writer.write(part)
                await writer.drain()
            assert b"200 OK" in await asyncio.wait_for(reader.readline(), 10)
            head_told = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            length = int(head_told.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b"text_completion" in await asyncio.wait_for(reader.readexactly(length), 10)
        writer.close()
    assert len(fake.started) == 4


async def test_body_after_an_upgrade_offer_is_not_parsed_as_a_request(address: tuple[str, int]) -> None:
    """The second, pipelined request offers an upgrade, which must not change how its body is read."""
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    first = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"  # the offer comes while that is answered
    offer = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(hidden)
    told = await exchange(address, first + offer + b"connection: upgrade, close\r\nupgrade: h2c\r\n\r\n" + hidden)
    assert b" 400 " in told and b"max_model_len" not in told


HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def test_body_after_its_response_is_not_parsed_as_a_request() -> None:
    app = FastAPI()

    @app.post("/")
    async def answer() -> None: ...

    async with serve_http(app) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(HIDDEN))
        await asyncio.wait_for(reader.readuntil(b"null"), 10)
        writer.write(HIDDEN + LAST)
        told = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert told.count(b" 404 ") == 1, "the last alone"


# ---- disconnects


@pytest.mark.parametrize("body", BODIES, ids=IDS)
@pytest.mark.parametrize("hang_after", [0, 3])
async def test_disconnect_ends_everything(
    address: tuple[str, int], fake: FakeTokenService, body: dict[str, Any], hang_after: int
) -> None:
    fake.hang_after = hang_after
    reader, writer = await asyncio.open_connection(*address)
    writer.write(http_post(body))
    await within(5, fake.is_hanging)
    if body.get("stream") and hang_after:
        await reader.readuntil(b"data: ")
    writer.close()
    await within(1, fake.has_ended)
    assert len(fake.ended) == len(fake.started) > 0


@pytest.mark.parametrize("hang_after", [0, 3])
async def test_disconnect_ends_a_request_with_another_pipelined_behind_it(
    address: tuple[str, int], fake: FakeTokenService, hang_after: int
) -> None:
    fake.hang_after = hang_after
    _, writer = await asyncio.open_connection(*address)
    writer.write(2 * http_post(BODIES[0]))
    await within(5, fake.is_hanging)
    writer.close()
    await within(1, fake.has_ended)
    assert len(fake.ended) == len(fake.started) == 1


async def test_reset_while_tokens_flow(address: tuple[str, int], fake: FakeTokenService) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(http_post({"prompt": "abc", "stream": True, "max_tokens": 250}))
    await reader.readuntil(b"data: ")
    writer.transport.abort()
    await within(1, fake.has_ended)


async def test_disconnect_during_the_upload(served: Served, address: tuple[str, int], fake: FakeTokenService) -> None:
    _, writer = await asyncio.open_connection(*address)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    assert (await served.http.get("/health")).status_code == 200
    assert not fake.started


async def test_endless_upload_times_out(completions: MakeCompletions, fake: FakeTokenService) -> None:
    app = create_app(completions(fake), access=Access.anybody(), is_healthy=lambda: True, max_body_s=0.05)
    async with serve_http(app) as address:
        answer = await exchange(address, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert b" 408 " in answer and b'"code":"request_timeout"' in answer
    assert not fake.started


async def test_headers_are_sent_with_the_first_token(served: Served) -> None:
    served.fake.hang_after = 1
    async with served.http.stream("POST", "/v1/completions", json=BODIES[0]) as answer:
        first = await anext(answer.aiter_lines())
        assert answer.status_code == 200 and "x-request-id" in answer.headers
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"


# ---- large bodies


async def fifty_megabytes() -> AsyncIterator[bytes]:
    for _ in range(50):
        yield b" " * 1_000_000


@pytest.mark.parametrize("is_announced", [True, False])
async def test_fifty_megabyte_body(served: Served, is_announced: bool) -> None:
    headers = {"content-length": "50000000"} if is_announced else {"transfer-encoding": "chunked"}
    tracemalloc.start()
    started_s = time.monotonic()
    answer = await served.http.post("/v1/completions", content=fifty_megabytes(), headers=headers)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.monotonic() - started_s < 5
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert str(MAX_REQUEST_BYTES) in answer.json()["error"]["message"]
    # Client and server together: a few parts of a megabyte, and the bytes held up to the limit.
    assert peak_bytes < 8_000_000 + (0 if is_announced else 2 * MAX_REQUEST_BYTES)
    assert not served.fake.started


@pytest.mark.parametrize("more", [b"", b"expect: 100-continue\r\n"], ids=["at once", "on request"])
@pytest.mark.parametrize("length", [50_000_000, 10**18])
async def test_announced_length_is_rejected_before_the_body(address: tuple[str, int], length: int, more: bytes) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (more, length))
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer.lower()
    if more:
        await asyncio.wait_for(reader.read(), 5)  # the server closes at once
    writer.close()


async def test_large_body_within_the_limit_is_accepted(served: Served) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 1}) + " " * (MAX_REQUEST_BYTES - 100)
    assert (await served.http.post("/v1/completions", content=body)).json()["choices"][0]["text"] == "a"


# ---- blocking client


async def test_blocking_client(served: Served) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            chunks = client.completions.create(model="tiny", prompt="abc", max_tokens=4, stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks)

    assert await asyncio.to_thread(ask) == "abca"
