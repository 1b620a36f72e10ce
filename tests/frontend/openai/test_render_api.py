"""Render endpoints: equal to what the generation endpoints send to an engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.access.keys import access_with, issue
from tests.support.serving import USER, Served, serving
from tests.support.tiny_service import MakeCompletions

pytestmark = pytest.mark.asyncio(loop_scope="module")

_TEXT = "The capital 你好<|im_end|>"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": _TEXT}),
        ("completions", {"prompt": [_TEXT, "b"], "add_special_tokens": False}),
        ("completions", {"prompt": [[5, 6], [7]], "n": 2}),
        ("completions", {"prompt": "ab" * 200, "truncate_prompt_tokens": 3}),
        ("chat/completions", {"messages": USER}),
        ("chat/completions", {"messages": USER, "continue_final_message": True, "stream": True}),
        ("chat/completions", {"messages": USER * 2, "truncate_prompt_tokens": -1, "max_tokens": 250}),
    ],
)
async def test_rendered_tokens_equal_those_sent_to_the_engine(
    endpoint: Served, path: str, body: dict[str, Any]
) -> None:
    answer = await endpoint.http.post(f"/v1/{path}/render", json={**body, "mood": 1})
    assert answer.headers["x-ignored-fields"] == "mood" and not endpoint.fake.started
    rendered = answer.json() if path == "completions" else [answer.json()]
    await endpoint.http.post(f"/v1/{path}", json={"max_tokens": 1, **body})
    assert [one["token_ids"] for one in rendered] == [list(one.token_ids) for one in endpoint.fake.started]
    for one in rendered:
        assert one["model"] == "tiny" and one["request_id"] == answer.headers["x-request-id"]
        ids = (
            await endpoint.http.post("/tokenize", json={"prompt": one["prompt"], "add_special_tokens": False})
        ).json()
        assert ids["tokens"][-len(one["token_ids"]) :] == one["token_ids"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {}),
        ("completions", {"prompt": "ab" * 300}),
        ("completions", {"prompt": ["a"] * 1025}),
        ("completions", {"prompt": "a", "temperature": -1}),
        ("completions", {"prompt": [5_000_000]}),
        ("completions", {"prompt": "a", "messages": USER}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": USER, "model": "other"}),
        ("chat/completions", {"messages": USER, "tool_choice": "required"}),
        ("chat/completions", {"messages": USER, "max_tokens": 1000}),
    ],
)
async def test_rejects_the_same_requests_as_generation(endpoint: Served, path: str, body: dict[str, Any]) -> None:
    asked = await endpoint.http.post(f"/v1/{path}", json=body)
    rendered = await endpoint.http.post(f"/v1/{path}/render", json=body)
    assert rendered.status_code == asked.status_code in (400, 404) and rendered.json() == asked.json()


async def test_key_is_required_and_tokens_are_not_charged(completions: MakeCompletions) -> None:
    known = issue("acme", tpm=1000, rpm=10)
    async with serving(completions(), access=access_with(known)) as served:
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": USER})):
            path, headers = f"/v1/{path}/render", {"authorization": known.header}
            assert (await served.http.post(path, json=body)).status_code == 401
            answer = await served.http.post(path, json=body, headers=headers)
            assert answer.headers["x-ratelimit-remaining-tokens"] == "1000"
        assert answer.headers["x-ratelimit-remaining-requests"] == "8"


async def test_repeated_prompts_are_limited(completions: MakeCompletions) -> None:
    async with serving(completions(max_context=2**15)) as served:
        for number, status in ((90, 200), (110, 400)):
            body = {"prompt": ["x" * 9000] * number, "max_tokens": 1}
            answer = await served.http.post("/v1/completions/render", json=body, timeout=60)
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "prompt"
