"""A streamed answer whose connection is lost goes on where it was, for who has asked for that, and for nobody else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from core.types.errors import RequestError, UnknownObject
from frontend.access.access import Access
from frontend.http.app import create_app
from frontend.http.held_streams import HeldStream
from tests.frontend.access.keys import access_with, issue
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions
from tests.support.waiting import becomes, stays

_BODY = {"model": "tiny", "prompt": "abcdef", "max_tokens": 9, "stream": True}
_HOLD = {"x-resume-within": "30", "x-request-id": "mine"}
_START = {"type": "http.response.start", "status": 200, "headers": []}
_ID = re.compile(r"^id: (\d+)$", re.MULTILINE)


@asynccontextmanager
async def _endpoint(
    completions: MakeCompletions, fake: FakeTokenService, access: Access | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(completions(fake), access=access or Access.anybody(), is_healthy=lambda: True, **options)
    async with serve_http(app) as (host, port), httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        yield http


async def _lose(http: httpx.AsyncClient, fake: FakeTokenService, *, headers: dict[str, str] = _HOLD) -> str:
    """What had come of a stream when its connection was closed: its first tokens, while the next are awaited."""
    got = ""
    async with http.stream("POST", "/v1/completions", json=_BODY, headers=headers) as answer:
        assert answer.status_code == 200 and answer.headers["x-request-id"] == headers["x-request-id"]
        async for text in answer.aiter_text():
            got += text
            if got.count("data:") == fake.hang_after:
                break
    return got


def _texts(stream: str) -> list[str]:
    """Without the numbers and times of events."""
    return [re.sub(r'"created":\d+', "", line) for line in stream.splitlines() if line.startswith("data:")]


async def test_a_lost_stream_goes_on_behind_the_last_event(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=3)
    async with _endpoint(completions, fake) as http:
        lost = await _lose(http, fake)
        fake.go_on.set()
        for after in ("1", "3"):
            rest = await http.get("/v1/streams/mine", headers={"last-event-id": after})
            assert rest.headers["content-type"].startswith("text/event-stream")
            assert rest.headers["x-request-id"] == "mine", "by which it can be taken up once more"
            assert _ID.findall(rest.text) == [str(i) for i in range(int(after) + 1, 12)]
        whole = await http.get("/v1/streams/mine")
        undisturbed = await http.post("/v1/completions", json=_BODY, headers={"x-request-id": "mine"})
        assert _texts(lost) + _texts(rest.text) == _texts(whole.text) == _texts(undisturbed.text)
        assert "id:" not in undisturbed.text and _texts(whole.text)[-1] == "data: [DONE]"
        assert [kind for _, kind in fake.ended] == [None, None]


async def test_the_openai_client_reads_what_is_left(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=3)
    async with _endpoint(completions, fake) as http:
        await _lose(http, fake)
        fake.go_on.set()
        async with openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
            options: Any = {"headers": {"Last-Event-ID": "3"}}
            rest = await client.get(
                "/streams/mine",
                cast_to=Completion,
                options=options,
                stream=True,
                stream_cls=openai.AsyncStream[Completion],
            )
            assert "".join([chunk.choices[0].text async for chunk in rest]) == "defabc"


async def test_whoever_did_not_ask_for_it_is_not_waited_for(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=3)
    async with _endpoint(completions, fake) as http:
        await _lose(http, fake, headers={"x-request-id": "mine"})
        await becomes(lambda: [kind for _, kind in fake.ended] == [asyncio.CancelledError])
        assert (await http.get("/v1/streams/mine")).status_code == 404
    async with _endpoint(completions, fake, max_resume_s=0.0) as http:  # the operator does not want it
        await _lose(http, fake)
        await becomes(lambda: len(fake.ended) == 2)


async def test_nobody_is_waited_for_longer_than_was_asked(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=3)
    async with _endpoint(completions, fake, max_resume_s=0.2) as http:
        await _lose(http, fake)  # asks for 30 s
        await becomes(lambda: [kind for _, kind in fake.ended] == [asyncio.CancelledError])
        assert (await http.get("/v1/streams/mine")).status_code == 404


async def test_it_can_be_ended(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=3)
    async with _endpoint(completions, fake) as http:
        await _lose(http, fake)
        assert (await http.delete("/v1/streams/mine")).json()["deleted"]
        await becomes(lambda: [kind for _, kind in fake.ended] == [asyncio.CancelledError])
        assert (await http.delete("/v1/streams/mine")).status_code == 404
        async with http.stream("POST", "/v1/completions", json=_BODY, headers=_HOLD) as answer:
            await http.delete("/v1/streams/mine")
            assert "[DONE]" not in (await answer.aread()).decode()  # its connection ends, too
        await becomes(lambda: len(fake.ended) == 2)


async def test_it_can_be_ended_before_it_begins(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=0)
    async with _endpoint(completions, fake) as http:
        asking = asyncio.ensure_future(http.post("/v1/completions", json=_BODY, headers=_HOLD))
        await fake.is_hanging.wait()
        assert (await http.delete("/v1/streams/mine")).json()["deleted"]
        answer = await asking
        assert answer.status_code == 404 and "before it began" in answer.json()["error"]["message"]
        assert [kind for _, kind in fake.ended] == [asyncio.CancelledError]


async def test_nobody_waits_for_one_that_was_ended_before_it_began() -> None:
    held = HeldStream(30.0)

    async def send(message: Any) -> None:
        pass

    first, second = (asyncio.ensure_future(held.play(send)) for _ in range(2))
    await asyncio.sleep(0)
    held.leave()
    async with asyncio.timeout(10):
        told = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(one) for one in told] == [UnknownObject] * 2


async def test_who_ends_it_does_not_wait_for_whoever_reads() -> None:
    held, is_sending, is_cancelled = HeldStream(30.0), asyncio.Event(), asyncio.Event()

    async def make() -> None:
        await held.send(_START)
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    async def send(message: Any) -> None:
        is_sending.set()
        await asyncio.Event().wait()  # to a connection that takes nothing

    making = asyncio.ensure_future(held.outlive(make(), held.play(send)))
    async with asyncio.timeout(10):
        await is_sending.wait()
        held.leave()
        await is_cancelled.wait()
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)


async def test_an_id_may_have_any_visible_characters(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=3)
    async with _endpoint(completions, fake) as http:
        for id in ("run/7", "a%2Fb", "a?b#c"):
            fake.go_on.clear()
            await _lose(http, fake, headers={**_HOLD, "x-request-id": id})
            assert (await http.delete(f"/v1/streams/{quote(id, safe='')}")).json()["id"] == id


async def test_the_connection_that_comes_last_reads(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=3)
    async with _endpoint(completions, fake, max_resume_s=0.2) as http:
        async with http.stream("POST", "/v1/completions", json=_BODY, headers=_HOLD) as first:
            await fake.is_hanging.wait()
            async with http.stream("GET", "/v1/streams/mine") as second:
                before = (await first.aread()).decode()  # it ends
                fake.go_on.set()
                after = (await second.aread()).decode()
        assert _ID.findall(before) == ["1", "2", "3"] and _ID.findall(after) == [str(i) for i in range(1, 12)]


async def test_who_has_come_back_has_come_back() -> None:
    """The time for it does not run any more."""
    is_left = asyncio.Event()
    held = HeldStream(0.01, on_left=is_left.set)
    await held.send(_START)

    async def send(message: Any) -> None:
        pass

    lost = asyncio.ensure_future(held.play(send))
    await asyncio.sleep(0)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    playing = asyncio.ensure_future(held.play(send))
    await stays(lambda: not is_left.is_set(), for_s=0.1)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await is_left.wait()


async def test_who_reads_is_not_left_because_somebody_else_has_gone() -> None:
    is_left = asyncio.Event()
    held = HeldStream(0.01, on_left=is_left.set)
    await held.send(_START)

    async def send(message: Any) -> None:
        pass

    first = asyncio.ensure_future(held.play(send))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(held.play(send))
    await first
    await stays(lambda: not is_left.is_set(), for_s=0.1)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await is_left.wait()


async def test_it_is_its_keys_and_keeps_its_place(completions: MakeCompletions) -> None:
    ours, theirs = issue("acme", concurrency=1), issue("zenith")
    fake = FakeTokenService(hang_after=3)
    async with _endpoint(completions, fake, access_with(ours, theirs)) as http:
        await _lose(http, fake, headers={**_HOLD, "authorization": ours.header})
        more = await http.post("/v1/completions", json=_BODY, headers={"authorization": ours.header})
        assert more.status_code == 429
        for method in ("GET", "DELETE"):
            rejected = await http.request(method, "/v1/streams/mine", headers={"authorization": theirs.header})
            assert rejected.status_code == 404
        assert (await http.get("/v1/streams/mine")).status_code == 401
        fake.go_on.set()
        assert "[DONE]" in (await http.get("/v1/streams/mine", headers={"authorization": ours.header})).text


async def test_what_is_refused(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=3)
    async with _endpoint(completions, fake) as http:
        for wrong in ("0", "-1", "soon", "1e9", "٣", ""):
            headers = [(b"x-resume-within", wrong.encode())]
            answer = await http.post("/v1/completions", json=_BODY, headers=headers)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-resume-within"
        await _lose(http, fake)
        again = await http.post("/v1/completions", json=_BODY, headers=_HOLD)
        assert again.status_code == 400 and "is held already" in again.json()["error"]["message"]
        for wrong in ("-1", "x", "99", "1e3"):
            answer = await http.get("/v1/streams/mine", headers={"last-event-id": wrong})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "last-event-id"
        bad = await http.post("/v1/completions", json={**_BODY, "n": 0}, headers={**_HOLD, "x-request-id": "bad"})
        assert bad.status_code == 400 and (await http.get("/v1/streams/bad")).status_code == 404


async def test_an_answer_that_fails_at_once_has_its_status_and_is_not_held(completions: MakeCompletions) -> None:
    fake = FakeTokenService(reject=RequestError("no"))
    async with _endpoint(completions, fake) as http:
        answer = await http.post("/v1/completions", json=_BODY, headers=_HOLD)
        assert answer.status_code == 400 and answer.json()["error"]["message"] == "no"
        assert (await http.get("/v1/streams/mine")).status_code == 404


async def test_there_is_room_for_so_many_of_a_key_and_no_more(completions: MakeCompletions) -> None:
    fake = FakeTokenService(hang_after=3)
    async with _endpoint(completions, fake) as http:
        for number in range(32):
            await _lose(http, fake, headers={**_HOLD, "x-request-id": f"r{number}"})
        async with http.stream("POST", "/v1/completions", json=_BODY, headers=_HOLD) as answer:
            assert answer.status_code == 200 and "x-resume-within" not in answer.headers
        assert (await http.get("/v1/streams/mine")).status_code == 404


async def test_what_nobody_reads_is_not_made_and_what_was_sent_makes_room() -> None:
    held, sent = HeldStream(30.0, max_bytes=100), list[bytes]()
    making = asyncio.ensure_future(_make(held, 40))

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    while not making.done() and held.num_held < 5:  # some 20 bytes each
        await asyncio.sleep(0)
    assert not making.done()
    await held.play(send)
    await making
    assert [int(number) for number in re.findall(rb"id: (\d+)", b"".join(sent))] == list(range(1, 41))
    with pytest.raises(UnknownObject):
        await held.play(send, after=1)
    with pytest.raises(RequestError):
        await held.play(send, after=41)
    for after in (40, 40 - held.num_held):
        await held.play(send, after=after)
    with pytest.raises(UnknownObject):  # the first that is missing is the last that was dropped
        await held.play(send, after=40 - held.num_held - 1)


async def _make(held: HeldStream, num: int) -> None:
    await held.send(_START)
    for i in range(num):
        await held.send({"type": "http.response.body", "body": b"data: %04d\n\n" % i, "more_body": True})
    await held.send({"type": "http.response.body", "body": b"", "more_body": False})


@given(
    together=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    breaks=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=4),
)
def test_whatever_breaks_a_client_has_every_event_once(together: list[int], breaks: list[tuple[int, int]]) -> None:
    """breaks: after so many pieces a connection breaks, and so many of its last events never came."""

    async def play() -> list[int]:
        held, got = HeldStream(30.0, max_bytes=400), list[int]()

        async def make() -> None:
            await held.send(_START)
            number = 0
            for count in together:
                body = b"".join(b"data: %d\n\n" % (number + i) for i in range(count))
                number += count
                await held.send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(0)
            await held.send({"type": "http.response.body", "body": b"", "more_body": False})

        making = asyncio.ensure_future(make())
        for pieces, lost in [*breaks, (1000, 0)]:
            left = [pieces]

            async def send(message: Any, left: list[int] = left) -> None:
                got.extend(int(number) for number in re.findall(rb"id: (\d+)", message.get("body", b"")))
                left[0] -= 1
                if left[0] < 0:
                    raise ConnectionResetError

            try:
                await held.play(send, after=len(got))
            except ConnectionResetError:
                del got[len(got) - min(lost, len(got)) :]
        await making
        return got

    assert asyncio.run(play()) == list(range(1, sum(together) + 1))


async def test_two_connections_never_share_the_events() -> None:
    held, got = HeldStream(30.0), (list[bytes](), list[bytes]())
    await held.send(_START)
    await held.send({"type": "http.response.body", "body": b"data: 1\n\ndata: 2\n\n", "more_body": True})

    async def play(number: int) -> None:
        async def send(message: Any) -> None:
            for _ in range(9):
                await asyncio.sleep(0)  # others have their turn
            got[number].append(message.get("body", b""))

        await held.play(send)

    first = asyncio.ensure_future(play(0))
    while b"id: 2" not in b"".join(got[0]):
        await asyncio.sleep(0)
    second = asyncio.ensure_future(play(1))
    await first
    await held.send({"type": "http.response.body", "body": b"data: 3\n\n"})
    await second
    assert [b"".join(of).count(b"id: ") for of in got] == [2, 3]
