"""Large bodies over HTTP: parsed off the event loop, and rejected cheaply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from frontend.http.app import create_app
from frontend.text.completion_request import MAX_REQUEST_BYTES
from frontend.text.tokenizer import Tokenizer
from tests.frontend.access.keys import IssuedKey, access_with, issue
from tests.support.fake_token_service import FakeTokenService
from tests.support.serving import Serve, blocked_threads
from tests.support.tiny_service import MakeCompletions

_MANY = MAX_REQUEST_BYTES // 3 - 100


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("completions", b'{"prompt":[' + b",".join([b"12"] * _MANY) + b"]}", "prompt", "context_length_exceeded"),
        ("completions", b'{"prompt":[' + b",".join([b'""'] * _MANY) + b"]}", "prompt", "context_length_exceeded"),
        ("completions", b'{"prompt":[' + b",".join([b'"\\\\"'] * (_MANY // 2)) + b"]}", "prompt", None),
        ("completions", b'{"prompt":"a","metadata":[' + b",".join([b"{}"] * _MANY) + b"]}", "metadata", None),
        ("completions", b'{"prompt":"a","user":"' + b"x" * 3 * _MANY + b'"}', "user", None),
        ("completions", b'{"prompt":"' + b"x" * 3 * _MANY + b'"}', "prompt", "context_length_exceeded"),
        ("completions", b'{"prompt":[' + b",".join([b"[]"] * _MANY) + b'],"prompt":"abc"}', "prompt", None),
        ("completions", b'{"prompt":[' + b",".join([b"1"] * _MANY) + b'],"pr\\u006fmpt":"abc"}', "prompt", None),
        ("chat/completions", b'{"messages":[' + b",".join([b"{}"] * _MANY) + b"]}", "messages", None),
        ("chat/completions", b'{"messages":[' + b",".join([b"{}"] * 20_000) + b"]}", "messages[0].role", None),
        ("chat/completions", b'{"messages":[],"tools":[' + b",".join([b"{}"] * _MANY) + b"]}", "tools", None),
        ("chat/completions", b'{"messages":[],"tools":[' + b",".join([b"{}"] * 50_000) + b"]}", "tools", None),
        ("responses", b'{"input":[' + b",".join([b"{}"] * _MANY) + b"]}", "input", None),
        ("../tokenize", b'{"prompt":"' + b"x" * 3 * _MANY + b'"}', "prompt", "context_length_exceeded"),
        ("../detokenize", b'{"tokens":[' + b",".join([b"12"] * _MANY) + b"]}", "tokens", "context_length_exceeded"),
        ("chat/completions", b'{"messages":[],"chat_template_kwargs":' + b"[" * 3 * _MANY + b"}", None, None),
    ],
    ids=[
        *("ids", "strings", "quotes", "metadata", "user", "text", "twice", "twice in other letters", "messages"),
        *("bad messages", "tools", "many tools", "items", "tokenize", "detokenize", "nesting"),
    ],
)
async def test_ten_megabytes_are_rejected_by_field(
    serve: Serve, path: str, body: bytes, param: str | None, code: str | None
) -> None:
    answer = await (await serve()).http.post(f"/v1/{path}", content=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert code in (None, error["code"])


@pytest.mark.parametrize("padding", [0, 30_000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"a\ud83c", "a\ufffd"),
        (r"\uDF89a", "\ufffda"),
        (r"\ud83c\ud83c\udf89", "\ufffd🎉"),
        (r"\\ud83c", r"\ud83c"),
        (r"\\\ud83c\udf89", "\\🎉"),
    ],
)
async def test_lone_surrogates_are_replaced(
    serve: Serve, byte_level: Tokenizer, escaped: str, text: str, padding: int
) -> None:
    """Clients cut texts between the halves of a pair. The byte order mark is one that Windows adds to a file."""
    served = await serve()
    body = f'\ufeff{{"prompt": "{escaped}", "max_tokens": 1, "metadata": "{"x" * padding}"}}'
    answer = await served.http.post("/v1/completions", content=body.encode())
    assert answer.status_code == 200, answer.text
    assert byte_level.decode(served.fake.started[0].token_ids) == text


@pytest.mark.parametrize("padding", [0, 30_000], ids=["small", "large"])
async def test_the_last_of_a_repeated_field_counts(serve: Serve, byte_level: Tokenizer, padding: int) -> None:
    served = await serve()
    body = f'{{"prompt": [1, 2], "max_tokens": 9, "metadata": "{"x" * padding}", "prompt": "abc", "max_tokens": 1}}'
    answer = await served.http.post("/v1/completions", content=body.encode())
    assert answer.status_code == 200, answer.text
    assert byte_level.decode(served.fake.started[0].token_ids) == "abc"
    assert answer.json()["usage"]["completion_tokens"] == 1


async def test_parsing_a_large_body_does_not_block_streams(serve: Serve) -> None:
    served = await serve()
    async with blocked_threads(served.service):
        large = json.dumps({"prompt": "abc", "max_tokens": 1, "stop": ["x" * 1000] * 16, "metadata": "x" * 30_000})
        asking = asyncio.create_task(served.http.post("/v1/completions", content=large))
        small = {"prompt": "abc", "max_tokens": 50, "stream": True}
        async with served.http.stream("POST", "/v1/completions", json=small) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]" and len(lines) > 40
        assert not asking.done()
    assert (await asking).json()["choices"][0]["text"] == "a"


async def test_excess_large_bodies_are_rejected_for_now(serve: Serve) -> None:
    served, large = await serve(), {"prompt": "abc", "max_tokens": 1, "metadata": "x" * 30_000}
    async with blocked_threads(served.service, num=64):
        answer = await served.http.post("/v1/completions", json=large)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert (await served.http.post("/v1/completions", json=large)).status_code == 200


async def test_slow_uploads_of_one_key_leave_room_for_others(completions: MakeCompletions) -> None:
    """One key may hold a quarter of the memory; small bodies are exempt."""
    slow, other = issue("slow"), issue("other")
    service = completions(FakeTokenService())
    app = create_app(service, access=access_with(slow, other), is_healthy=lambda: True)
    have_arrived, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def upload(num_bytes: int) -> AsyncIterator[bytes]:
        yield b" " * num_bytes
        have_arrived.release()  # the server reads more
        await go_on.wait()

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x/v1/") as client:

        async def post(issued: IssuedKey, **body: Any) -> int:
            return (await client.post("completions", headers={"authorization": issued.header}, **body)).status_code

        async def ask(issued: IssuedKey, **more: str) -> int:
            return await post(issued, json={"prompt": "abc", "max_tokens": 1} | more)

        sizes = (*[9_000_000] * 7, 4_000_000)  # 0.1 MB less than its share
        uploads = [asyncio.create_task(post(slow, content=upload(num_bytes))) for num_bytes in sizes]
        for _ in uploads:
            await have_arrived.acquire()
        assert await ask(slow, metadata="x" * 200_000) == 429
        assert await ask(slow) == 200
        assert await ask(other) == 200
        assert await ask(other, metadata="x" * 30_000) == 200
        go_on.set()
        assert await asyncio.gather(*uploads) == [400] * len(sizes)  # blanks are not valid JSON
        assert await ask(slow, metadata="x" * 200_000) == 200
    service.close()
