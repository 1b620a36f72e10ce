"""Limits that apply before a request is read or tokenized, at both endpoints."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import grpc
import httpx
import pytest

from core.rpc import inference_pb2 as pb
from core.types.api_key import ApiKey
from frontend.access.limiter import LocalLimiter, Reservation
from frontend.http.connections import GRPC_ENDPOINT
from frontend.text.completion_request import MAX_REQUEST_BYTES
from tests.frontend.access.keys import IssuedKey, access_with, issue
from tests.frontend.http.raw_http2 import RawHttp2
from tests.support.serving import Serve, Served, authorized, blocked_threads

_BODY = {"prompt": "abc", "max_tokens": 1}
_GENERATE = "/cluster.v1.Inference/Generate"
_HEALTH = "/grpc.health.v1.Health/Check"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class FakeEntrance(LocalLimiter):
    """Limiter that reports when a slot is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.is_taken = asyncio.Event()

    async def enter(self, key: ApiKey, *, id: str, ahead: int = 0) -> Reservation:
        found = await super().enter(key, id=id, ahead=ahead)
        self.is_taken.set()
        return found


async def ask(served: Served, known: IssuedKey, **more: object) -> httpx.Response:
    headers = {"authorization": known.header}
    return await served.http.post("/v1/completions", json=_BODY | more, headers=headers, timeout=30)


async def generate(served: Served, known: IssuedKey) -> grpc.StatusCode:
    call = served.call(pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=1)), known)
    with suppress(grpc.aio.AioRpcError):
        [event async for event in call]
    code: grpc.StatusCode = await call.code()
    return code


def begun(channel: grpc.aio.Channel, known: IssuedKey) -> Any:
    """Start a call with headers only."""
    return channel.stream_stream(_GENERATE)(metadata=authorized(known))


@pytest.mark.parametrize("is_finished", [False, True], ids=["vanishes", "makes no sense"])
async def test_http_slot_is_taken_before_the_body(serve: Serve, is_finished: bool) -> None:
    known, entrance = issue("acme", concurrency=1), FakeEntrance()
    access = access_with(known, limiter=entrance)
    served = await serve(access=access)
    reader, writer = await asyncio.open_connection(*served.address)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {known.header}\r\ncontent-length: 50\r\n\r\n"
    writer.write(head.encode() + b"x")
    await asyncio.wait_for(entrance.is_taken.wait(), 30)
    answer = await ask(served, known)
    assert answer.status_code == 429 and "1 requests at a time" in answer.text
    if is_finished:
        writer.write(b"x" * 49)
        assert b" 400 " in await reader.readline()
    writer.close()
    async with asyncio.timeout(30):
        while (await ask(served, known)).status_code != 200:
            pass  # the server has not noticed yet
    await access.limits.settled()


async def test_grpc_slot_is_taken_before_the_message(serve: Serve) -> None:
    known, entrance = issue("acme", concurrency=1), FakeEntrance()
    access = access_with(known, limiter=entrance)
    served = await serve(access=access)
    call = begun(served.channel, known)
    await asyncio.wait_for(entrance.is_taken.wait(), 30)
    assert await generate(served, known) is grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()
    async with asyncio.timeout(30):
        while await generate(served, known) is not grpc.StatusCode.OK:
            pass
    await access.limits.settled()


async def test_exhausted_key_tokenizes_nothing(serve: Serve) -> None:
    known = issue("acme", tpm=260)
    access, long = access_with(known), "a b " * 600
    served = await serve(access=access, max_context=2000)
    async with blocked_threads(served.service):
        never = await ask(served, known, prompt=[long] * 6)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
        assert "needs at least" in never.text
        ids = [5] * 200
        assert (await ask(served, known, prompt=ids)).status_code == 200
        await access.limits.settled()
        later = await ask(served, known, prompt=long)
        assert later.status_code == 429 and "260 tokens a minute" in later.text
        assert (await ask(served, known, prompt=ids[:58])).status_code == 200
        await access.limits.settled()
        assert (await ask(served, known)).status_code == 429


async def test_many_small_prompts_are_tokenized_on_a_thread(serve: Serve) -> None:
    known = issue("acme")
    served = await serve(access=access_with(known), max_context=2000)
    async with blocked_threads(served.service):
        asking = asyncio.create_task(ask(served, known, prompt=["a b " * 100] * 20))
        assert (await ask(served, known)).status_code == 200
        assert not asking.done()
    assert (await asking).status_code == 200


@pytest.mark.parametrize("method", [_GENERATE, _REFLECTION])
async def test_waiting_messages_are_hardly_buffered(serve: Serve, method: str) -> None:
    """Twelve messages of one key are received at a time."""
    known, other, size = issue("acme"), issue("other"), 1 << 20
    access = access_with(known, other)
    served = await serve(access=access, grpc_limits=replace(GRPC_ENDPOINT, message_s=600.0))
    client = await RawHttp2.open("127.0.0.1", served.api.port)
    data = b"\0" + size.to_bytes(4, "big") + bytes(size - 1)
    streams = [client.begin(method, authorization=known.header, data=data) for _ in range(30)]
    async with asyncio.timeout(30):
        while sum(client.sent[stream] == len(data) for stream in streams) < 12:
            await client.pump()
    pumping = asyncio.create_task(client.pump_forever())
    for _ in range(20):
        assert await generate(served, other) is grpc.StatusCode.OK
    pumping.cancel()
    await asyncio.gather(pumping, return_exceptions=True)
    client.close()
    taken = sorted(client.sent[stream] for stream in streams)
    assert taken[-12:] == [len(data)] * 12 and taken[-13] < 1 << 16


@pytest.mark.parametrize("method", [_GENERATE, _HEALTH])
async def test_oversized_message_is_not_buffered(serve: Serve, method: str) -> None:
    known, size = issue("acme"), MAX_REQUEST_BYTES + 1
    served = await serve(access=access_with(known))
    client = await RawHttp2.open("127.0.0.1", served.api.port)
    stream = client.begin(method, authorization=known.header, data=b"\0" + size.to_bytes(4, "big") + bytes(size - 1))
    async with asyncio.timeout(30):
        while stream not in client.ended:
            await client.pump()
    client.close()
    assert client.sent[stream] < 1 << 16


async def test_waiting_calls_of_one_key_are_limited(serve: Serve) -> None:
    """Twelve are read and as many wait as two connections allow, whatever the number of connections."""
    known = issue("acme")
    limits = replace(GRPC_ENDPOINT, streams=16, message_s=600.0)
    served, own = await serve(access=access_with(known), grpc_limits=limits), [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        calls = []
        for _ in range(4):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{served.api.port}", options=own)
            await stack.enter_async_context(channel)
            calls += [begun(channel, known) for _ in range(16)]
        ended = [asyncio.create_task(call.code()) for call in calls]
        codes = [await code for code in islice(asyncio.as_completed(ended, timeout=30), 64 - 12 - 32)]
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in calls:
            call.cancel()
        await asyncio.gather(*ended)


async def test_unfinished_messages_are_displaced_in_time(serve: Serve) -> None:
    """Displaced before their own timeout, also by calls of the same key and with several slow keys."""
    keys = [issue(f"key-{number}") for number in range(3)]
    served = await serve(access=access_with(*keys), grpc_limits=replace(GRPC_ENDPOINT, message_s=12.0))
    calls = [begun(served.channel, known) for known in keys for _ in range(14)]
    codes = await asyncio.gather(*(generate(served, known) for known in keys))
    assert set(codes) == {grpc.StatusCode.OK}
    assert grpc.StatusCode.DEADLINE_EXCEEDED not in [await call.code() for call in calls if call.done()]
    for call in calls:
        call.cancel()
