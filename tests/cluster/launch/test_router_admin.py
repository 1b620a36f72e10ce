"""Foreign listeners on router admin ports: whatever they answer, they are not routers of this deployment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace

import pytest

from cluster.launch import router_admin
from cluster.launch.router_admin import AdminAnswer, ask_at, ask_here, await_seen, seen_by
from core.types.errors import DeployError
from tests.cluster.deployments import make_state
from tests.support.waiting import WITHIN_S

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[str]:
    """Listen and reply to each request with `answer`. Yields "host:port"."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if task := asyncio.current_task():
            handling.append(task)
        with closing(writer), suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
            await writer.drain()

    handling: list[asyncio.Task[None]] = []
    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield "{}:{}".format(*server.sockets[0].getsockname())
        for task in handling:
            task.cancel()
        await asyncio.gather(*handling, return_exceptions=True)


def replies(body: bytes, *, head: str = "200 OK") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    return answer


def health(**changes: object) -> bytes:
    return json.dumps({"deployment": "d", "router": "r", "replicas": {"prefill": 1, "decode": 1}} | changes).encode()


async def query(*answers: Answer) -> list[AdminAnswer]:
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(listening(answer)) for answer in answers]
        return await asyncio.wait_for(asyncio.to_thread(ask_here, "d", addresses, "/health"), WITHIN_S)


async def test_foreign_answers_are_ignored() -> None:
    foreign_bodies = [
        b'{"deployment":"d"}',
        health(replicas=3),
        health(replicas={"decode": "1"}),
        health(replicas={"decode": True}),
        health(replicas={"decode": -1}),
        b"[" * 100_000,
        b"\xff\xfe",
        b"",
        health(more="x" * (1 << 20)),
    ]
    router = replies(health(), head="503 Service Unavailable")
    found = await query(
        *map(replies, foreign_bodies), router, replies(b"", head="302 Found\r\nLocation: http://127.0.0.1:1/")
    )
    assert [(answer.status, answer.body) for answer in found] == [(503, health())]
    assert seen_by(found) == {"prefill": 1, "decode": 1}


async def test_endless_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_admin, "_ANSWER_S", 0.3)

    async def drip(writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"x" if begun else b"HTTP/1.1 200 OK\r\n\r\n")
            begun.append(True)
            await writer.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 0.1)

    begun: list[bool] = []
    assert await query(drip) == [] and begun


async def test_stalling_listener_does_not_delay_others() -> None:
    is_other_asked = asyncio.Event()

    async def late(writer: asyncio.StreamWriter) -> None:
        await is_other_asked.wait()
        await replies(health())(writer)

    async def other(writer: asyncio.StreamWriter) -> None:
        is_other_asked.set()
        await replies(health())(writer)

    assert len(await query(late, other)) == 2


async def test_commands_ignore_foreign_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    pending_peer = AdminAnswer("127.0.0.1:1", 200, b'{"deployment":"d"}')
    router = replace(pending_peer, body=health())
    assert seen_by([pending_peer]) is None
    assert seen_by([pending_peer, router]) == seen_by([router]) == {"prefill": 1, "decode": 1}
    monkeypatch.setattr("cluster.launch.router_admin.ask_routers", lambda state, path: [pending_peer])
    with pytest.raises(DeployError, match="no router answers"):
        await_seen(make_state("d", admin=("a:1",)), {"decode": 1}, within_s=0.0)
    async with listening(replies(b"not JSON")) as address:
        [answer] = await asyncio.to_thread(ask_at, f"http://{address}", "/debug/routes/r1")
    assert answer.json() == {}
