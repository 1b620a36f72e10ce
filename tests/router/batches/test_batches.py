"""Batches as openai's own client has them: from a file to answers, what is refused, whose they are, how they end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import redis

from core.types.api_key import KeyRegistry
from core.types.errors import ReplicaLost
from core.types.request import OFFLINE
from frontend.access.access import Access
from frontend.access.keyring import Keyring
from frontend.access.limits import Limits
from frontend.access.local_limiter import LocalLimiter
from frontend.http import files_api
from frontend.http.app import create_app
from router.batches.bounds import ENTRY_BYTES, MAX_LINE_BYTES, PART_BYTES, BatchBounds
from tests.frontend.access.keys import SALT_KEY, access_with, book_of, issue
from tests.router.batches.batch_doors import BatchRouter, batch_router, chat_line, ended, jsonl, read, sent
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions
from tests.support.waiting import becomes


@pytest.fixture
def empty_redis(redis_url: str) -> str:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    return redis_url


@pytest.fixture
async def router(completions: MakeCompletions, empty_redis: str) -> AsyncIterator[BatchRouter]:
    async with batch_router(completions, empty_redis) as one:
        yield one


async def test_from_a_file_to_answers(router: BatchRouter) -> None:
    client = router.client
    lines = [chat_line(f'"ask\\ é🎉 {number}', max_tokens=1 + number % 3) for number in range(10)]
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    assert (file.filename, file.bytes, file.purpose, file.object) == ("in.jsonl", len(jsonl(lines)), "batch", "file")
    assert (await client.files.retrieve(file.id)) == file
    assert (await client.files.content(file.id)).content == jsonl(lines)
    batch = await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"for": "tests"},
    )
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"for": "tests"})
    assert batch.expires_at == batch.created_at + 86_400
    done = await ended(client, batch)
    assert done.request_counts and done.request_counts.model_dump() == {"total": 10, "completed": 10, "failed": 0}
    assert done.in_progress_at and done.completed_at and done.errors is None and done.error_file_id is None
    answers = await read(client, done.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines], "in the file's order"
    assert len({answer["id"] for answer in answers}) == 10
    for answer, line in zip(answers, lines, strict=True):
        assert answer.keys() == {"id", "custom_id", "response", "error"} and answer["error"] is None
        response = answer["response"]
        whole = openai.types.chat.ChatCompletion.model_validate(response["body"])
        assert response["status_code"] == 200 and response["request_id"] in whole.id
        assert whole.usage and whole.usage.completion_tokens == line["body"]["max_tokens"]
    assert {request.priority for request in router.fake.started} == {OFFLINE}, "behind everybody who waits"
    output = await client.files.retrieve(done.output_file_id or "")
    assert output.purpose == "batch_output" and output.filename == f"{batch.id}_output.jsonl"
    assert [one.id for one in (await client.batches.list()).data] == [batch.id]
    assert {one.id async for one in client.files.list()} == {file.id, output.id}
    assert [one.id async for one in client.files.list(purpose="batch")] == [file.id]
    assert (await client.files.delete(output.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(output.id)


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}, "text_completion"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, "response"),
    ],
)
async def test_the_other_endpoints(router: BatchRouter, endpoint: str, body: dict[str, Any], kind: str) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    done = await ended(router.client, await sent(router.client, jsonl([line]), endpoint=endpoint))
    [answer] = await read(router.client, done.output_file_id)
    assert (answer["response"]["status_code"], answer["response"]["body"]["object"]) == (200, kind)


async def test_each_line_is_answered_by_the_model_that_it_names(completions: MakeCompletions, empty_redis: str) -> None:
    async with batch_router(completions, empty_redis, beside=["big", "bigger"]) as router:
        lines = [chat_line(model, model=model) for model in ("big", "tiny", "bigger")]
        done = await ended(router.client, await sent(router.client, jsonl(lines)))
        answers = await read(router.client, done.output_file_id)
        assert [one["response"]["body"]["model"] for one in answers] == ["big", "tiny", "bigger"]
        assert (await router.client.batches.retrieve(done.id)).model_dump()["model"] == "big", "that of the first line"
        done = await ended(
            router.client, await sent(router.client, jsonl([chat_line("a", model="other")])), status="failed"
        )
        assert done.errors and done.errors.data
        said = "body.model: 'tiny', 'big' and 'bigger' are served here, not 'other'"
        assert (done.errors.data[0].code, done.errors.data[0].message) == ("model_not_found", said)


async def test_a_line_waits_for_a_model_that_is_away(completions: MakeCompletions, empty_redis: str) -> None:
    """As long as that takes: as after a failure it would be tried at once, a few times, and be over."""
    async with batch_router(completions, empty_redis, again_s=0.0) as router:
        router.models.report_unavailable("late", "it is just being taken up")
        batch = await sent(router.client, jsonl([chat_line("a", model="late")]))
        await becomes(lambda: 'xpyd_requests_total{outcome="model_unavailable"} 2.0' in router.metrics)
        router.models.add(completions(FakeTokenService(), name="late"))
        done = await ended(router.client, batch)
        [answer] = await read(router.client, done.output_file_id)
        assert answer["response"]["body"]["model"] == "late"


async def test_a_line_that_is_refused_is_in_the_error_file_with_the_answer_that_it_got(router: BatchRouter) -> None:
    lines = [chat_line("good"), chat_line("hot", temperature=1000), chat_line("too long", max_tokens=100_000)]
    done = await ended(router.client, await sent(router.client, jsonl(lines)))
    assert done.request_counts and (done.request_counts.completed, done.request_counts.failed) == (1, 2)
    assert [one["custom_id"] for one in await read(router.client, done.output_file_id)] == ["good"]
    hot, long = await read(router.client, done.error_file_id)
    assert (hot["custom_id"], hot["response"]["status_code"], hot["error"]) == ("hot", 400, None)
    assert hot["response"]["body"]["error"]["param"] == "temperature"
    assert long["response"]["body"]["error"]["message"]


async def test_each_answer_is_one_line_however_lines_are_told_apart(router: BatchRouter) -> None:
    odd = "a\x85b\u2028c\u2029d\u2028"
    lines = [chat_line(odd), chat_line(f"{odd}2", user=odd * 100)]
    done = await ended(router.client, await sent(router.client, jsonl(lines)))
    assert [line["custom_id"] for line in await read(router.client, done.output_file_id)] == [odd]
    assert [line["custom_id"] for line in await read(router.client, done.error_file_id)] == [f"{odd}2"]


async def test_every_line_is_checked_before_any_is_answered(router: BatchRouter) -> None:
    lines: list[Any] = [
        chat_line("a"),
        chat_line("a"),
        {**chat_line("b"), "url": "/v1/embeddings"},
        {**chat_line("c"), "method": "GET"},
        {key: value for key, value in chat_line("d").items() if key != "custom_id"},
        {**chat_line("e"), "custom_id": 7},
        chat_line("f", model="other"),
        chat_line("g", stream=True),
        {**chat_line("h"), "body": []},
        [],
    ]
    content = jsonl(lines) + b"\n{broken\n" + b'{"custom_id": "' + b"x" * MAX_LINE_BYTES + b'"}\n' + jsonl(["never"])
    done = await ended(router.client, await sent(router.client, content), status="failed")
    assert done.errors and done.errors.data and done.failed_at
    assert [(one.line, one.code, one.param) for one in done.errors.data] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_url", "url"),
        (4, "invalid_method", "method"),
        (5, "missing_required_parameter", "custom_id"),
        (6, "invalid_custom_id", "custom_id"),
        (7, "model_not_found", "body.model"),
        (8, "invalid_value", "body.stream"),
        (9, "invalid_body", "body"),
        (10, "invalid_json_line", None),
        (12, "invalid_json_line", None),
        (13, "line_too_long", None),
    ]
    assert all(one.message for one in done.errors.data)
    assert not router.fake.started and done.output_file_id is None


@pytest.mark.parametrize(("content", "code"), [(b"", "empty_file"), (b" \n\n", "empty_file")])
async def test_a_file_without_lines(router: BatchRouter, content: bytes, code: str) -> None:
    done = await ended(router.client, await sent(router.client, content), status="failed")
    assert done.errors and done.errors.data and [one.code for one in done.errors.data] == [code]


@pytest.mark.parametrize("end", [b"", b"\n"])
async def test_the_mark_by_which_an_editor_begins_a_file_is_passed_over(router: BatchRouter, end: bytes) -> None:
    content = b"\xef\xbb\xbf" + jsonl([chat_line("a")]).rstrip(b"\n") + end
    done = await ended(router.client, await sent(router.client, content))
    assert done.output_file_id and [one["custom_id"] for one in await read(router.client, done.output_file_id)] == ["a"]


async def test_a_file_of_several_parts_and_of_lines_across_them(router: BatchRouter) -> None:
    lines = [chat_line(f"{number}", metadata={"beside": "x" * 150_000}) for number in range(5)]
    content = jsonl(lines).rstrip(b"\n")  # the last line may end without one
    batch = await sent(router.client, content)
    assert (await router.client.files.content(batch.input_file_id)).content == content
    done = await ended(router.client, batch)
    both = [
        one["custom_id"]
        for id in (done.output_file_id, done.error_file_id)
        if id
        for one in await read(router.client, id)
    ]
    assert sorted(both) == [str(number) for number in range(5)]


async def test_what_is_refused_at_once(router: BatchRouter) -> None:
    client = router.client
    with pytest.raises(openai.BadRequestError, match="purpose") as rejected:
        await client.files.create(file=("a.jsonl", b"{}"), purpose="assistants")
    assert rejected.value.param == "purpose"
    file = await client.files.create(file=("a.jsonl", jsonl([chat_line("a")])), purpose="batch")
    asked: dict[str, Any] = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for wrong, param in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
    ):
        with pytest.raises(openai.BadRequestError) as bad:
            await client.batches.create(**{**asked, **wrong})
        assert bad.value.param == param
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.batches.create(**{**asked, "input_file_id": "file-none"})
    assert (unknown.value.param, unknown.value.code) == ("input_file_id", "not_found")
    async with httpx.AsyncClient(base_url=router.address) as http:
        for headers, content in (
            ({"content-type": "application/json"}, b"{}"),
            ({"content-type": "multipart/form-data; boundary=b"}, b"--b\r\nContent-Disposition: form-data; na"),
            ({"content-type": "multipart/form-data; boundary=b"}, b"--b\r\n" + b"x" * 5000),
            ({"content-type": "multipart/form-data; boundary=b"}, b"--b--\r\n"),
        ):
            answer = await http.post("/v1/files", headers=headers, content=content)
            assert answer.status_code == 400, answer.text
        assert (await http.get("/v1/files?limit=0")).status_code == 400
        assert (await http.get("/v1/batches?limit=101")).status_code == 400
    assert [one.id async for one in client.files.list()] == [file.id], "nothing is left of what was refused"


async def test_a_file_may_go_earlier(router: BatchRouter) -> None:
    more: dict[str, Any] = {"expires_after": {"anchor": "created_at", "seconds": 7200}}
    file = await router.client.files.create(file=("a", b"{}"), purpose="batch", **more)
    assert file.expires_at == file.created_at + 7200
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        more["expires_after"]["seconds"] = 10
        await router.client.files.create(file=("a", b"{}"), purpose="batch", **more)


async def test_batches_may_be_off(completions: MakeCompletions, empty_redis: str) -> None:
    app = create_app(completions(FakeTokenService()), access=Access.anybody(), is_healthy=lambda: True)
    async with serve_http(app) as (host, port):
        async with openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match=r"router\.batch_mib"):
                await client.files.create(file=("a", b"{}"), purpose="batch")
            with pytest.raises(openai.BadRequestError, match=r"router\.batch_mib"):
                await client.batches.retrieve("batch_x")


async def test_nothing_is_there_for_another_tenant(completions: MakeCompletions, empty_redis: str) -> None:
    one, twin, other = issue("one", tenant="team"), issue("twin", tenant="team"), issue("other")
    async with batch_router(completions, empty_redis, access=access_with(one, twin, other)) as router:
        mine, its_twin, strange = (router.client_of(issued.secret) for issued in (one, twin, other))
        batch = await ended(mine, await sent(mine, jsonl([chat_line("a")])))
        assert (await its_twin.batches.retrieve(batch.id)).id == batch.id
        assert await read(its_twin, batch.output_file_id)
        assert [one async for one in strange.files.list()] == [one async for one in strange.batches.list()] == []
        calls = {
            "file": [strange.files.retrieve, strange.files.content, strange.files.delete],
            "batch": [strange.batches.retrieve, strange.batches.cancel],
        }
        for what, id in (("file", batch.input_file_id), ("file", batch.output_file_id), ("batch", batch.id)):
            never = f"{what}-{'0' * 32}"
            for call in calls[what]:
                said = []
                for asked in (id, never):
                    with pytest.raises(openai.NotFoundError) as rejected:
                        await call(asked)  # type: ignore[operator]
                    said.append(str(rejected.value.body).replace(asked or "", "ID"))
                assert said[0] == said[1], "in the same words as one that never was"
        with pytest.raises(openai.NotFoundError):
            await strange.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )


async def test_a_tenants_room_is_bounded_and_comes_back(completions: MakeCompletions, empty_redis: str) -> None:
    one, other = issue("one"), issue("other")
    bounds = BatchBounds(max_bytes=2**20, max_files=3, max_batches=1)
    async with batch_router(completions, empty_redis, access=access_with(one, other), bounds=bounds) as router:
        mine, strange = router.client_of(one.secret), router.client_of(other.secret)
        large = 2**19 - 4 * ENTRY_BYTES - 8 * PART_BYTES
        with pytest.raises(openai.APIStatusError) as rejected:
            await mine.files.create(file=("a", b"x" * (2**19 + 1)), purpose="batch")
        assert rejected.value.status_code == 413
        first = await mine.files.create(file=("a", b"x" * large), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="delete files"):
            await mine.files.create(file=("a", b"x" * 20_000), purpose="batch")
        theirs = await strange.files.create(file=("a", b"x" * (large - 20_000)), purpose="batch")
        await mine.files.delete(first.id)
        await strange.files.delete(theirs.id)
        batch = await sent(mine, jsonl([chat_line("a")]))
        await ended(mine, batch)
        await mine.files.create(file=("a", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="3 files"):
            await mine.files.create(file=("a", b"x"), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="1 batches"):
            await mine.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        for file in [one async for one in mine.files.list()]:
            await mine.files.delete(file.id)
    with redis.Redis.from_url(empty_redis) as client:
        assert client.hgetall("d:offline:bytes") == {
            name: str(ENTRY_BYTES).encode() for name in client.hkeys("d:offline:bytes")
        }, "only the batch itself is left"
        assert not client.keys("d:offline:data:*") and not client.keys("d:offline:file:*")


@pytest.mark.parametrize("beside", ["before the first part", "in a part of another name", "behind the last"])
async def test_what_stands_beside_a_file_is_bounded(
    completions: MakeCompletions, empty_redis: str, beside: str
) -> None:
    """Also where the client does not say how long its body is."""

    async def body() -> AsyncIterator[bytes]:
        if beside != "before the first part":
            yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
            yield b'Content-Disposition: form-data; name="other"; filename="f"\r\n\r\n{}'
        if beside == "behind the last":
            yield b"\r\n--b--\r\n"
        for _ in range(400):
            yield b"x" * 4096

    async with batch_router(completions, empty_redis, bounds=BatchBounds(max_bytes=2**20)) as router:
        async with httpx.AsyncClient(base_url=router.address) as http:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            answer = await http.post("/v1/files", headers=headers, content=body())
            assert (answer.status_code, answer.json()["error"]["param"]) == (413, "file")


async def test_files_that_are_being_read_are_bounded(
    completions: MakeCompletions, empty_redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_api, "MAX_HELD", 40_000)
    async with batch_router(completions, empty_redis) as router:
        client, ids = router.client, dict[int, str]()
        for size in (50_000, 30_000, 10_000):
            ids[size] = (await client.files.create(file=("a", b"x" * size), purpose="batch")).id
        with pytest.raises(openai.RateLimitError, match="too many large files"):
            await client.files.content(ids[50_000])
        for size in (30_000, 30_000, 10_000):
            assert len((await client.files.content(ids[size])).content) == size, "each gives its room back"


async def test_what_answers_need_beyond_the_room_ends_a_batch(completions: MakeCompletions, empty_redis: str) -> None:
    bounds = BatchBounds(max_bytes=2 * (4 * ENTRY_BYTES + 8192))
    async with batch_router(completions, empty_redis, bounds=bounds, at_a_time=1) as router:
        lines = [chat_line(f"{number}") for number in range(30)]
        done = await ended(router.client, await sent(router.client, jsonl(lines)), status="failed")
        assert done.errors and done.errors.data and done.errors.data[0].code == "storage_full"
        assert done.request_counts and 0 < done.request_counts.completed < 30
        assert len(await read(router.client, done.output_file_id)) == done.request_counts.completed, "what there is"


async def test_lines_that_redis_lost_or_somebody_changed_are_not_answers(router: BatchRouter, empty_redis: str) -> None:
    batch = await ended(router.client, await sent(router.client, jsonl([chat_line("a"), chat_line("b")])))
    with redis.Redis.from_url(empty_redis) as client:
        [data] = [key for key in client.keys("d:offline:data:*") if client.hexists(key, "2")]
        one = client.hget(data, "1")
        client.hset(data, "2", one)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        await router.client.files.content(batch.output_file_id or "")


async def test_cancelled_with_what_was_answered(router: BatchRouter) -> None:
    fake = router.fake
    lines = [chat_line(f"{number}") for number in range(12)]
    answered = asyncio.Event()

    def script(request: Any, choice: int) -> Any:
        if len(fake.started) >= 5:
            fake.hang_after = 1
            answered.set()
        return request.token_ids

    fake.script = script
    batch = await sent(router.client, jsonl(lines))
    await answered.wait()
    cancelling = await router.client.batches.cancel(batch.id)
    assert cancelling.status in ("cancelling", "cancelled")
    done = await ended(router.client, batch, status="cancelled")
    assert done.cancelling_at and done.cancelled_at and done.request_counts
    answers = await read(router.client, done.output_file_id) if done.output_file_id else []
    assert len(answers) == done.request_counts.completed < 12
    await fake.has_ended.wait()
    assert (await router.client.batches.cancel(batch.id)).status == "cancelled", "whoever asks may ask twice"


async def test_what_has_ended_cannot_be_cancelled(router: BatchRouter) -> None:
    batch = await ended(router.client, await sent(router.client, jsonl([chat_line("a")])))
    with pytest.raises(openai.BadRequestError, match="is completed"):
        await router.client.batches.cancel(batch.id)


async def test_a_window_that_is_over(completions: MakeCompletions, empty_redis: str) -> None:
    fake = FakeTokenService(hang_after=1)
    bounds = BatchBounds(max_bytes=2**20, window_s=3.0)
    async with batch_router(completions, empty_redis, bounds=bounds, fake=fake) as router:
        lines = [chat_line(f"{number}") for number in range(6)]
        done = await ended(router.client, await sent(router.client, jsonl(lines)), status="expired")
        assert done.expired_at and done.output_file_id is None
        assert done.request_counts and (done.request_counts.total, done.request_counts.failed) == (6, 6)
        errors = await read(router.client, done.error_file_id)
        assert [one["custom_id"] for one in errors] == [str(number) for number in range(6)]
        assert {(one["response"], one["error"]["code"]) for one in errors} == {(None, "batch_expired")}


async def test_a_keys_limits_are_waited_for(completions: MakeCompletions, empty_redis: str) -> None:
    key, twin = issue("one", tenant="team", concurrency=1), issue("twin", tenant="team")
    fake = FakeTokenService(hang_after=1)
    async with batch_router(completions, empty_redis, access=access_with(key, twin), fake=fake) as router:
        batch = await sent(router.client_of(key.secret), jsonl([chat_line(f"{number}") for number in range(3)]))
        await fake.is_hanging.wait()
        await becomes(lambda: re.search(r'outcome="rate_limit_exceeded"} [1-9]', router.metrics))
        fake.hang_after = None
        fake.go_on.set()
        done = await ended(router.client_of(twin.secret), batch)
        assert done.request_counts and done.request_counts.model_dump() == {"total": 3, "completed": 3, "failed": 0}


async def test_a_revoked_key_ends_its_batches(completions: MakeCompletions, empty_redis: str) -> None:
    gone, stays = issue("gone", tenant="team"), issue("stays", tenant="team")
    keyring = Keyring(None, salt_key=SALT_KEY, is_required=True)
    keyring.take(book_of(gone, stays))
    access, fake = Access(keyring, Limits(None, LocalLimiter())), FakeTokenService(hang_after=1)
    async with batch_router(completions, empty_redis, access=access, fake=fake, at_a_time=1) as router:
        batch = await sent(router.client_of(gone.secret), jsonl([chat_line("a"), chat_line("b")]))
        await fake.is_hanging.wait()
        keyring.take(KeyRegistry(version=2, keys=(stays.key,)))
        fake.hang_after = None
        fake.go_on.set()
        client = router.client_of(stays.secret)
        done = await ended(client, batch, status="failed")
        assert done.errors and done.errors.data and done.errors.data[0].code == "invalid_api_key"
        assert [one["custom_id"] for one in await read(client, done.output_file_id)] == ["a"], "what was begun before"


async def test_an_input_file_that_is_deleted_ends_the_batch(completions: MakeCompletions, empty_redis: str) -> None:
    fake = FakeTokenService(hang_after=1)
    async with batch_router(completions, empty_redis, fake=fake, at_a_time=1, lease_s=1.0) as router:
        batch = await sent(router.client, jsonl([chat_line(f"{number}") for number in range(4)]))
        await fake.is_hanging.wait()
        await router.client.files.delete(batch.input_file_id)
    fake = FakeTokenService()
    async with batch_router(completions, empty_redis, fake=fake) as router:
        done = await ended(router.client, batch, status="failed")
        assert done.errors and done.errors.data and done.errors.data[0].code == "file_not_found"


async def test_what_serves_a_line_may_be_lost_for_a_while(router: BatchRouter) -> None:
    router.fake.reject = ReplicaLost("no replica")
    batch = await sent(router.client, jsonl([chat_line("a")]))
    await becomes(lambda: re.search(r'outcome="replica_lost"} [1-9]', router.metrics))
    router.fake.reject = None
    done = await ended(router.client, batch)
    assert done.request_counts and done.request_counts.completed == 1


async def test_a_line_that_loses_every_replica_ends_by_that(completions: MakeCompletions, empty_redis: str) -> None:
    fake = FakeTokenService(reject=ReplicaLost("no replica"))
    async with batch_router(completions, empty_redis, fake=fake, again_s=0.001) as router:
        done = await ended(router.client, await sent(router.client, jsonl([chat_line("a")])))
        (error,) = await read(router.client, done.error_file_id)
        assert 'outcome="replica_lost"} 6.0' in router.metrics, "once, and five times again"
    assert error["response"]["status_code"] == 503 and error["response"]["body"]["error"]["code"] == "replica_lost"


async def test_lists_go_on_where_they_ended(router: BatchRouter) -> None:
    client = router.client
    batches = [await sent(client, jsonl([chat_line("a")])) for _ in range(3)]
    newest_first = [batch.id for batch in reversed(batches)]
    assert [one.id async for one in client.batches.list(limit=2)] == newest_first
    page = await client.batches.list(limit=2)
    assert (page.has_more, [one.id for one in page.data]) == (True, newest_first[:2])
    files = [batch.input_file_id for batch in batches]
    assert [one.id async for one in client.files.list(order="asc", limit=2, purpose="batch")] == files
    for batch in batches:
        await ended(client, batch)
