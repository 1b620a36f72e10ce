"""Tokenization at both endpoints."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import grpc
import pytest

from core.rpc import inference_pb2 as pb
from frontend.text.tokenizer import Tokenizer
from tests.support.serving import USER, Served, refusal

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
