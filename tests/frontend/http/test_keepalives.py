"""Keep-alives of silent streams: before the first token and between tokens, in each API's own form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from core.spec.schema import RouterSpec
from core.types.errors import CapacityError, ReplicaLost
from frontend.http.event_stream import COMMENT, EventStream
from frontend.openai.errors import OpenAIErrors
from tests.support.fake_token_service import FakeTokenService
from tests.support.serving import USER, Serve

_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/completions of several": {"prompt": ["hi", "ho"], "max_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
}
_PING = 'event: ping\ndata: {"type":"ping"}'
_ALIVE = {path: _PING if path == "/v1/messages" else ": keepalive" for path in _BODIES}


_ALIVE_OFTEN = RouterSpec(keepalive_s=0.01)


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    """Yield the events as they arrive."""
    text = ""
    async for part in answer.aiter_text():
        *events, text = (text + part).split("\n\n")
        for event in events:
            yield event
    assert not text


@pytest.mark.parametrize("after", [0, 2], ids=["before the first token", "between tokens"])
@pytest.mark.parametrize("path", _BODIES)
async def test_silent_stream_sends_keepalives(serve: Serve, path: str, after: int) -> None:
    fake = FakeTokenService(hang_after=after)
    served = await serve(token_service=fake, spec=_ALIVE_OFTEN)
    async with served.http.stream("POST", path.split()[0], json={**_BODIES[path], "stream": True}) as answer:
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-cache")
        said, num_alive = list[str](), 0
        async for event in _events(answer):
            if event != _ALIVE[path]:
                said.append(event)
                continue
            num_alive += 1
            if num_alive == 3:
                assert bool(said) == bool(after)
                fake.go_on.set()
    assert num_alive >= 3
    plain = (await served.http.post(path.split()[0], json={**_BODIES[path], "stream": True})).text.split("\n\n")
    assert len(said) == len([event for event in plain if event and event != _ALIVE[path]])


@pytest.mark.parametrize("path", _BODIES)
async def test_failure_after_a_keepalive_is_an_event(serve: Serve, path: str) -> None:
    fake = FakeTokenService(hang_after=0, fail_after=(0, ReplicaLost("all gone")))
    served = await serve(token_service=fake, spec=_ALIVE_OFTEN)
    async with served.http.stream("POST", path.split()[0], json={**_BODIES[path], "stream": True}) as answer:
        said = []
        async for event in _events(answer):
            fake.go_on.set()
            if event != _ALIVE[path]:
                said.append(event)
    assert answer.status_code == 200
    names = [event.partition("\n")[0] for event in said if event.startswith("event: ")]
    failed = json.loads(said[-1].partition("data: ")[2])
    assert failed.get("response", failed)["error"]["message"] == "all gone"
    assert names == {
        "/v1/messages": ["event: error"],
        "/v1/responses": [f"event: response.{name}" for name in ("created", "in_progress", "failed")],
    }.get(path, [])


@pytest.mark.parametrize("path", _BODIES)
async def test_failure_before_a_keepalive_keeps_its_status(serve: Serve, path: str) -> None:
    fake = FakeTokenService(reject=CapacityError("full", retry_after_s=7))
    served = await serve(token_service=fake)
    answer = await served.http.post(path.split()[0], json={**_BODIES[path], "stream": True})
    assert answer.status_code == (529 if path == "/v1/messages" else 429)
    assert answer.headers["retry-after"] == "7"


async def test_official_clients_pass_over_keepalives(serve: Serve) -> None:
    """Each call returns with the headers, which a keep-alive brings: no token arrives before `go_on`."""
    fake = FakeTokenService(hang_after=0)
    served = await serve(token_service=fake, spec=_ALIVE_OFTEN)
    client = served.client
    stream = await client.chat.completions.create(model="tiny", messages=USER, max_tokens=4, stream=True)
    fake.go_on.set()
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    fake.go_on.clear()
    async with client.responses.stream(model="tiny", input="hi", max_output_tokens=4) as responses:
        fake.go_on.set()
        kinds = [event.type async for event in responses]
    assert kinds[0] == "response.created"
    fake.go_on.clear()
    agent = served.anthropic()
    async with agent.messages.stream(model="tiny", messages=USER, max_tokens=4) as messages:
        fake.go_on.set()
        assert await messages.get_final_text()


async def test_client_that_leaves_a_silent_stream_ends_its_request(serve: Serve) -> None:
    fake = FakeTokenService(hang_after=0)
    served = await serve(token_service=fake, spec=_ALIVE_OFTEN)
    async with served.http.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as answer:
        async for _ in answer.aiter_text():
            break
    await asyncio.wait_for(fake.has_ended.wait(), 30)


async def _sent(events: AsyncGenerator[bytes, None], pause: Callable[[], Awaitable[object]]) -> list[Any]:
    """Return the statuses and bodies of a stream in their order. pause: awaited behind each of them."""
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message.get("status") or message["body"])
        await pause()

    stream = EventStream(events, more_headers={}, errors=OpenAIErrors(), keepalive_s=0.01)
    await stream({"type": "http", "method": "POST"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize("case", ["event", "failure", "failure before it begins"])
async def test_event_waits_for_the_keepalive_that_is_being_sent(case: str) -> None:
    is_sending, now = asyncio.Event(), asyncio.get_running_loop().time

    async def pause() -> None:
        is_sending.set()
        await asyncio.sleep(0)

    async def events() -> AsyncGenerator[bytes, None]:
        if case == "failure before it begins":  # the timer runs between these two steps of the event loop
            due = now() + 0.02
            while now() < due:
                pass
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        else:
            await is_sending.wait()
        if case != "event":
            raise ReplicaLost("gone")
        yield b"event"

    status, keepalive, event, end = await _sent(events(), pause)
    assert (status, keepalive, end) == (200, COMMENT, b"")
    assert (b"event" if case == "event" else b"gone") in event


async def test_no_keepalive_is_sent_beside_an_error_response() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise ReplicaLost("gone")
        yield b""

    async def pause() -> None:
        now = asyncio.get_running_loop().time
        due = now() + 0.05  # several keep-alives would be due
        while now() < due:
            await asyncio.sleep(0)

    status, body = await _sent(events(), pause)
    assert status == 503 and b"gone" in body
