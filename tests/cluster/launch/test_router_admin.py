"""Strangers at the ports that routers could have: whatever they answer, they are no routers of this deployment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace

import pytest

from cluster.launch.router_admin import AdminAnswer, ask_at, ask_here, await_seen, seen_by
from cluster.launch.state import State
from core.types.errors import DeployError
from tests.support.waiting import WITHIN_S

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[str]:
    """Gives "host:port", where `answer` writes to whoever has asked for something."""

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


def says(body: bytes, *, head: str = "200 OK") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    return answer


def health(**changes: object) -> bytes:
    return json.dumps({"deployment": "d", "router": "r", "replicas": {"prefill": 1, "decode": 1}} | changes).encode()


async def asked(*answers: Answer) -> list[AdminAnswer]:
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(listening(answer)) for answer in answers]
        return await asyncio.wait_for(asyncio.to_thread(ask_here, "d", addresses, "/health"), WITHIN_S)


async def test_what_does_not_answer_as_a_router_does_is_none() -> None:
    strangers = [
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
    router = says(health(), head="503 Service Unavailable")
    found = await asked(*map(says, strangers), router, says(b"", head="302 Found\r\nLocation: http://127.0.0.1:1/"))
    assert [(answer.status, answer.body) for answer in found] == [(503, health())]
    assert seen_by(found) == {"prefill": 1, "decode": 1}


async def test_who_answers_without_an_end_is_not_waited_for() -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"x" if begun else b"HTTP/1.1 200 OK\r\n\r\n")
            begun.append(True)
            await writer.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 0.1)

    begun: list[bool] = []
    assert await asked(drip) == [] and begun


async def test_who_stalls_keeps_no_other_from_being_heard() -> None:
    is_other_asked = asyncio.Event()

    async def late(writer: asyncio.StreamWriter) -> None:
        await is_other_asked.wait()
        await says(health())(writer)

    async def other(writer: asyncio.StreamWriter) -> None:
        is_other_asked.set()
        await says(health())(writer)

    assert len(await asked(late, other)) == 2


async def test_commands_pass_strangers_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pending_peer = AdminAnswer("127.0.0.1:1", 200, b'{"deployment":"d"}')
    router = replace(pending_peer, body=health())
    assert seen_by([pending_peer]) is None
    assert seen_by([pending_peer, router]) == seen_by([router]) == {"prefill": 1, "decode": 1}
    state = State(name="d", ray_address="", local_ray=None, grpc="", http="", admin=("a:1",), deploying=None)
    monkeypatch.setattr("cluster.launch.router_admin.ask_routers", lambda state, path: [pending_peer])
    with pytest.raises(DeployError, match="no router answers"):
        await_seen(state, {"decode": 1}, within_s=0.0)
    async with listening(says(b"not JSON")) as address:
        [answer] = await asyncio.to_thread(ask_at, f"http://{address}", "/debug/routes/r1")
    assert answer.json() == {}
