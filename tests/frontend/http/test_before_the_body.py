"""Limits that apply before a request is read or tokenized, at both endpoints."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from itertools import islice

import grpc
import httpx
import pytest

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from core.types.api_key import ApiKey
from frontend.access.access import Access
from frontend.access.limiter import Reservation
from frontend.access.local_limiter import LocalLimiter
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.http.connections import GRPC_ENDPOINT
from frontend.text.completion import Completions
from frontend.text.completion_request import MAX_REQUEST_BYTES
from tests.frontend.access.keys import IssuedKey, access_with, issue
from tests.frontend.http.raw_http2 import RawHttp2
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.tiny_service import MakeCompletions

_BODY = {"prompt": "abc", "max_tokens": 1}
_GENERATE = "/cluster.v1.Inference/Generate"
_HEALTH = "/grpc.health.v1.Health/Check"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@asynccontextmanager
async def http_endpoint(service: Completions, access: Access) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(service, access=access, is_healthy=lambda: True)
    async with serve_http(app) as (host, port), http_client(base_url=f"http://{host}:{port}/v1/") as client:
        yield client
    service.close()


@asynccontextmanager
async def grpc_endpoint(
    service: Completions, access: Access, *, max_message_s: float = 60.0
) -> AsyncIterator[tuple[grpc.aio.Channel, int]]:
    """Yield the endpoint and its port."""
    endpoint = await open_grpc_api(
        service, access=access, host="127.0.0.1", port=0, limits=replace(GRPC_ENDPOINT, message_s=max_message_s)
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel:
            yield channel, endpoint.port
    finally:
        await endpoint.close(grace_s=0)
        service.close()


class FakeEntrance(LocalLimiter):
    """Limiter that reports when a slot is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.is_taken = asyncio.Event()

    async def enter(self, key: ApiKey, *, id: str, ahead: int = 0) -> Reservation:
        found = await super().enter(key, id=id, ahead=ahead)
        self.is_taken.set()
        return found


async def ask(client: httpx.AsyncClient, known: IssuedKey, **more: object) -> httpx.Response:
    return await client.post("completions", json=_BODY | more, headers={"authorization": known.header}, timeout=30)


async def generate(channel: grpc.aio.Channel, known: IssuedKey, text: str = "abc") -> grpc.StatusCode:
    asked = pb.GenerateRequest(prompt=text, sampling=pb.SamplingParams(max_tokens=1))
    call = InferenceStub(channel).Generate(asked, metadata=(("authorization", known.header),), timeout=30)
    with suppress(grpc.aio.AioRpcError):
        [event async for event in call]
    code: grpc.StatusCode = await call.code()
    return code


@pytest.mark.parametrize("is_finished", [False, True], ids=["vanishes", "makes no sense"])
async def test_http_slot_is_taken_before_the_body(completions: MakeCompletions, is_finished: bool) -> None:
    known, entrance = issue("acme", concurrency=1), FakeEntrance()
    access = access_with(known, limiter=entrance)
    async with http_endpoint(completions(FakeTokenService()), access) as client:
        assert client.base_url.port
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: {known.header}\r\ncontent-length: 50\r\n\r\n"
        )
        writer.write(head.encode() + b"x")
        await asyncio.wait_for(entrance.is_taken.wait(), 30)
        answer = await ask(client, known)
        assert answer.status_code == 429 and "1 requests at a time" in answer.text
        if is_finished:
            writer.write(b"x" * 49)
            assert b" 400 " in await reader.readline()
        writer.close()
        async with asyncio.timeout(30):
            while (await ask(client, known)).status_code != 200:
                pass  # the server has not noticed yet
        await access.limits.settled()


async def test_grpc_slot_is_taken_before_the_message(completions: MakeCompletions) -> None:
    known, entrance = issue("acme", concurrency=1), FakeEntrance()
    access = access_with(known, limiter=entrance)
    async with grpc_endpoint(completions(FakeTokenService()), access) as (channel, _):
        begun = channel.stream_stream(_GENERATE)(metadata=(("authorization", known.header),))
        await asyncio.wait_for(entrance.is_taken.wait(), 30)
        assert await generate(channel, known) is grpc.StatusCode.RESOURCE_EXHAUSTED
        begun.cancel()
        async with asyncio.timeout(30):
            while await generate(channel, known) is not grpc.StatusCode.OK:
                pass
        await access.limits.settled()


@asynccontextmanager
async def blocked_threads(service: Completions) -> AsyncIterator[None]:
    """Block the thread pool until the block ends."""
    go_on = threading.Event()
    holding = [asyncio.ensure_future(service.threads.run("", go_on.wait, 60)) for _ in range(8)]
    try:
        yield
    finally:
        go_on.set()
        await asyncio.gather(*holding)


async def test_exhausted_key_tokenizes_nothing(completions: MakeCompletions) -> None:
    known = issue("acme", tpm=260)
    access, long = access_with(known), "a b " * 600
    service = completions(FakeTokenService(), max_context=2000)
    async with http_endpoint(service, access) as client, blocked_threads(service):
        never = await ask(client, known, prompt=[long] * 6)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
        assert "needs at least" in never.text
        ids = [5] * 200
        assert (await ask(client, known, prompt=ids)).status_code == 200
        await access.limits.settled()
        later = await ask(client, known, prompt=long)
        assert later.status_code == 429 and "260 tokens a minute" in later.text
        assert (await ask(client, known, prompt=ids[:58])).status_code == 200
        await access.limits.settled()
        assert (await ask(client, known)).status_code == 429


async def test_many_small_prompts_are_tokenized_on_a_thread(completions: MakeCompletions) -> None:
    service = completions(FakeTokenService(), max_context=2000)
    known = issue("acme")
    async with http_endpoint(service, access_with(known)) as client:
        async with blocked_threads(service):
            asking = asyncio.create_task(ask(client, known, prompt=["a b " * 100] * 20))
            assert (await ask(client, known)).status_code == 200
            assert not asking.done()
        assert (await asking).status_code == 200


async def test_unfinished_messages_of_one_key_do_not_block_others(completions: MakeCompletions) -> None:
    slow, other = issue("slow"), issue("other")
    async with grpc_endpoint(completions(FakeTokenService()), access_with(slow, other)) as (channel, _):
        begun = [channel.stream_stream(_GENERATE)(metadata=(("authorization", slow.header),)) for _ in range(100)]
        for _ in range(20):
            assert await generate(channel, other) is grpc.StatusCode.OK
        for call in begun:
            call.cancel()


@pytest.mark.parametrize("method", [_GENERATE, _REFLECTION])
async def test_waiting_messages_are_hardly_buffered(completions: MakeCompletions, method: str) -> None:
    """Twelve messages of one key are received at a time."""
    known, other, size = issue("acme"), issue("other"), 1 << 20
    access = access_with(known, other)
    async with grpc_endpoint(completions(FakeTokenService()), access, max_message_s=600.0) as (channel, port):
        client = await RawHttp2.open("127.0.0.1", port)
        data = b"\0" + size.to_bytes(4, "big") + bytes(size - 1)
        streams = [client.begin(method, authorization=known.header, data=data) for _ in range(30)]
        async with asyncio.timeout(30):
            while sum(client.sent[stream] == len(data) for stream in streams) < 12:
                await client.pump()
        pumping = asyncio.create_task(client.pump_forever())
        for _ in range(20):
            assert await generate(channel, other) is grpc.StatusCode.OK
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
        client.close()
        taken = sorted(client.sent[stream] for stream in streams)
        assert taken[-12:] == [len(data)] * 12 and taken[-13] < 1 << 16


@pytest.mark.parametrize("method", [_GENERATE, _HEALTH])
async def test_oversized_message_is_not_buffered(completions: MakeCompletions, method: str) -> None:
    known, size = issue("acme"), MAX_REQUEST_BYTES + 1
    async with grpc_endpoint(completions(FakeTokenService()), access_with(known)) as (_, port):
        client = await RawHttp2.open("127.0.0.1", port)
        stream = client.begin(
            method, authorization=known.header, data=b"\0" + size.to_bytes(4, "big") + bytes(size - 1)
        )
        async with asyncio.timeout(30):
            while stream not in client.ended:
                await client.pump()
        client.close()
        assert client.sent[stream] < 1 << 16


async def test_waiting_calls_of_one_key_are_limited(completions: MakeCompletions) -> None:
    """Twelve are read and as many wait as two connections allow, whatever the number of connections."""
    known = issue("acme")
    endpoint = await open_grpc_api(
        completions(FakeTokenService()),
        access=access_with(known),
        host="127.0.0.1",
        port=0,
        limits=replace(GRPC_ENDPOINT, streams=16, message_s=600.0),
    )
    async with AsyncExitStack() as stack:
        begun = []
        for _ in range(4):
            own = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}", options=own)
            await stack.enter_async_context(channel)
            method = channel.stream_stream(_GENERATE)
            begun += [method(metadata=(("authorization", known.header),)) for _ in range(16)]
        ended = [asyncio.create_task(call.code()) for call in begun]
        codes = [await code for code in islice(asyncio.as_completed(ended, timeout=30), 64 - 12 - 32)]
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in begun:
            call.cancel()
        await asyncio.gather(*ended)
    await endpoint.close(grace_s=0)


async def test_unfinished_messages_are_displaced_in_time(completions: MakeCompletions) -> None:
    """Displaced before their own timeout, also by calls of the same key and with several slow keys."""
    keys = [issue(f"key-{number}") for number in range(3)]
    async with grpc_endpoint(completions(FakeTokenService()), access_with(*keys), max_message_s=12.0) as (channel, _):
        begun = [
            channel.stream_stream(_GENERATE)(metadata=(("authorization", known.header),))
            for known in keys
            for _ in range(14)
        ]
        codes = await asyncio.gather(*(generate(channel, known) for known in keys))
        assert set(codes) == {grpc.StatusCode.OK}
        assert grpc.StatusCode.DEADLINE_EXCEEDED not in [await call.code() for call in begun if call.done()]
        for call in begun:
            call.cancel()
