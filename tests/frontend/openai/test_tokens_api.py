"""Tokenization and rendering at both endpoints."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import grpc
import pytest

from core.rpc import inference_pb2 as pb
from frontend.text.tokenizer import Tokenizer
from tests.frontend.access.keys import access_with, issue
from tests.support.serving import USER, Served, refusal, serving
from tests.support.tiny_service import MakeCompletions

pytestmark = pytest.mark.asyncio(loop_scope="module")

_TEXT = "The capital 你好<|im_end|>"


async def test_tokenize_and_detokenize_text(endpoint: Served, byte_level: Tokenizer) -> None:
    body = {"model": "tiny", "prompt": _TEXT, "return_token_strs": True}
    told = (await endpoint.http.post("/tokenize", json=body)).json()
    ids = byte_level.encode(_TEXT)
    assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), 256)
    assert told["token_strs"] == [byte_level.token_text(token_id) for token_id in ids]
    back = await endpoint.http.post("/detokenize", json={"tokens": ids, "mood": 1})
    assert back.json() == {"prompt": _TEXT} and back.headers["x-ignored-fields"] == "mood"
    assert not endpoint.fake.started


async def test_messages_are_counted_like_a_chat(endpoint: Served) -> None:
    for more in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        told = (await endpoint.http.post("/tokenize", json={"messages": USER, **more})).json()
        body = {"messages": USER, "max_tokens": 1, "return_token_ids": True, **more}
        asked = (await endpoint.http.post("/v1/chat/completions", json=body)).json()
        assert told["tokens"] == asked["prompt_token_ids"] and told["token_strs"] is None


async def test_prompt_is_truncated_at_the_front(endpoint: Served, byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab" * 200)
    for num, kept in ((3, 3), (-1, 255), (100_000, len(ids))):
        body = {"prompt": "ab" * 200, "truncate_prompt_tokens": num, "max_tokens": 1, "return_token_ids": True}
        answer = await endpoint.http.post("/v1/completions", json=body)
        if kept > 255:
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        else:
            assert answer.json()["choices"][0]["prompt_token_ids"] == ids[-kept:]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [5_000_000]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_invalid_requests_are_rejected_by_name(
    endpoint: Served, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await endpoint.http.post(path, json=body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param


async def test_tokenizer_info(endpoint: Served, byte_level: Tokenizer) -> None:
    told = (await endpoint.http.get("/tokenizer_info")).json()
    (eos,) = byte_level.encode(told["eos_token"])
    assert eos in byte_level.eos_token_ids and "pad_token" in told
    assert told["chat_template"] == endpoint.service.prompts.chat_template.source != ""


async def test_version(endpoint: Served) -> None:
    assert (await endpoint.http.get("/version")).json() == {"version": version("xpyd")}


async def test_grpc_tokenize_and_detokenize(endpoint: Served, byte_level: Tokenizer) -> None:
    stub = endpoint.stub
    told = await stub.Tokenize(pb.TokenizeRequest(prompt=_TEXT))
    assert (list(told.token_ids), told.max_context) == (byte_level.encode(_TEXT), 256)
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    counted = await stub.Tokenize(pb.TokenizeRequest(chat=chat))
    events = await endpoint.generate(pb.GenerateRequest(chat=chat))
    assert len(counted.token_ids) == events[-1].summary.usage.prompt_tokens
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=told.token_ids))).text == _TEXT
    for wrong in (stub.Tokenize(pb.TokenizeRequest()), stub.Detokenize(pb.DetokenizeRequest(token_ids=[10**6]))):
        assert (await refusal(wrong)).code is grpc.StatusCode.INVALID_ARGUMENT


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
