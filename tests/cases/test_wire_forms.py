"""Forms of requests and answers that published clients send and need: lines, lengths, encodings, tools, usage."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from core.spec.schema import RouterSpec
from core.types.errors import ReplicaLost
from tests.cases.served import HI, TEMPLATES, Serve

_ENDS = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e"
_TEMPLATE = TEMPLATES["hermes_tools"] + "{# <think> </think> #}"
_CALL = "<tool_call>\n" + json.dumps({"name": "f", "arguments": {"x": _ENDS}}, ensure_ascii=False) + "\n</tool_call>"
_THOUGHT = f"<think>{_ENDS}</think>x"
_SCHEMA: dict[str, Any] = {"type": "object", "description": _ENDS}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}]
_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": HI}, _ENDS),
    "chat logprobs": ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 2}, _ENDS),
    "chat calls": ("/v1/chat/completions", {"messages": HI, "tools": _TOOLS}, _CALL),
    "chat thoughts": ("/v1/chat/completions", {"messages": HI}, _THOUGHT),
    "text": ("/v1/completions", {"prompt": "hi", "max_tokens": 200, "return_token_ids": True}, _ENDS),
    "echo": ("/v1/completions", {"prompt": _ENDS, "max_tokens": 200, "echo": True, "logprobs": 1}, _ENDS),
    "stop": ("/v1/completions", {"prompt": "hi", "max_tokens": 200, "stop": "\u2029z"}, _ENDS),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 200}, _ENDS),
    "messages calls": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 200, "tools": [{"name": "f", "input_schema": _SCHEMA}]},
        _CALL,
    ),
    "messages thoughts": ("/v1/messages", {"messages": HI, "max_tokens": 200}, _THOUGHT),
    "responses": ("/v1/responses", {"input": _ENDS, "instructions": _ENDS, "metadata": {"a": _ENDS}}, _ENDS),
    "responses calls": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}]},
        _CALL,
    ),
    "responses thoughts": ("/v1/responses", {"input": "hi"}, _THOUGHT),
}


@pytest.mark.parametrize("is_failing", [False, True], ids=["", "fails"])
@pytest.mark.parametrize("case", _CASES)
async def test_each_event_is_one_line(serve: Serve, case: str, is_failing: bool) -> None:
    """langgenius/dify#39008, kagent-dev/kagent#1480, BerriAI/litellm#30602: clients split lines as Unicode does."""
    path, body, text = _CASES[case]
    async with serve(chat_template=_TEMPLATE) as served:
        served.say(text)
        if is_failing:
            num_tokens = len(served.tokenizer.encode(f"{text}<|im_end|>"))
            served.fake.fail_after = (num_tokens - 1, ReplicaLost(_ENDS))
        async with served.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            lines = [line async for line in answer.aiter_lines()]
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert {line.partition(": ")[0] for line in lines} <= {"", "data", "event"}
    said = [json.loads(event) for event in events if event != "[DONE]"]
    assert "\u2028" in json.dumps(said, ensure_ascii=False), "the characters themselves arrive"
    assert not any(end in "".join(lines) for end in _ENDS if not end.isalpha())
    if is_failing:
        assert said[-1].get("response", said[-1])["error"]["message"] == _ENDS


async def test_max_tokens_is_an_upper_bound(serve: Serve) -> None:
    """vllm-project/vllm#42474, hivecommons/hive#1629, docker/docker-agent#3393, vllm-project/vllm#19861"""
    async with serve(max_context=64, spec=RouterSpec(max_tokens_beyond_context="clamp")) as served:
        served.fake.script = lambda *_: [40]
        for path, body, reason in (
            ("/v1/messages", {"messages": HI, "max_tokens": 32_000}, '"stop_reason":"max_tokens"'),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 32_000}, '"reason":"max_output_tokens"'),
            ("/v1/chat/completions", {"messages": HI, "max_tokens": 32_000}, '"finish_reason":"length"'),
        ):
            assert reason in (await served.post(path, **body)).text
            assert served.fake.started[-1].sampling.max_tokens == 64 - served.fake.started[-1].num_prompt_tokens


async def test_tools_of_no_function_are_skipped_and_named(serve: Serve) -> None:
    """ikawrakow/ik_llama.cpp#1964, openai/codex#8829: the body of Codex"""
    tools = [{"type": "function", "name": "look", "parameters": {}}, {"type": "web_search"}, {"type": "custom"}]
    searched = {"type": "web_search_call", "id": "w", "status": "completed"}
    async with serve(chat_template=TEMPLATES["hermes_tools"]) as served:
        served.say("So.")
        answer = await served.post("/v1/responses", tools=tools, input=[*HI, searched], reasoning={"effort": "medium"})
        assert "look" in served.prompt and "web_search" not in served.prompt.replace("web_search_call", "")
    assert {"tools[1].web_search", "reasoning.effort"} <= {*answer.headers["x-ignored-fields"].split(", ")}


async def test_compressed_bodies_are_read_within_the_limit(serve: Serve) -> None:
    """agentgateway/agentgateway#2402, QuantumNous/new-api#4913"""
    async with serve() as served:
        for content, encoding, status in (
            (gzip.compress(b'{"prompt": "hi", "max_tokens": 1}'), "gzip", 200),
            (gzip.compress(bytes(100_000_000)), "gzip", 413),
            (b"{}", "br", 415),
        ):
            answer = await served.http.post("/v1/completions", content=content, headers={"content-encoding": encoding})
            assert answer.status_code == status, answer.text


async def test_pattern_with_look_ahead_is_weakened_and_named(serve: Serve) -> None:
    """pydantic/pydantic#13017: the schema of a Decimal"""
    price = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    schema = {"type": "object", "properties": {"price": price}, "required": ["price"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "f", "strict": True, "schema": schema}}
    async with serve(has_grammars=True) as served:
        answer = await served.post("/v1/chat/completions", messages=HI, response_format=form, max_tokens=1)
        assert answer.headers["x-ignored-fields"].endswith("properties.price.pattern")
        (asked,) = served.fake.started
        assert asked.grammar and "(?!" not in asked.grammar.text and "0*" in asked.grammar.text


async def test_each_chunk_has_the_usage_so_far(serve: Serve) -> None:
    """vllm-project/guidellm#603, vllm-project/vllm#42661, ai-dynamo/aiperf#1279, ai-dynamo/dynamo#11708"""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serve() as served:
        served.fake.script = lambda *_: [40]
        answer = await served.post(
            "/v1/chat/completions", messages=HI, max_tokens=4, stream=True, stream_options=options
        )
    counts = [json.loads(event[6:])["usage"]["completion_tokens"] for event in answer.text.split("\n\n")[:-2]]
    assert counts[-1] == 4 and {1, 2, 3} <= {*counts} and counts == sorted(counts)


@pytest.mark.parametrize(("path", "sign"), [("/v1/chat/completions", ": keepalive"), ("/v1/messages", "event: ping")])
async def test_silent_stream_sends_signs_of_life(serve: Serve, path: str, sign: str) -> None:
    """BerriAI/litellm#34819, antirez/ds4#194, FastFlowLM/FastFlowLM#735"""
    async with serve(spec=RouterSpec(keepalive_s=0.01)) as served:
        served.fake.hang_after = 0
        async with served.http.stream("POST", path, json={"messages": HI, "max_tokens": 4, "stream": True}) as answer:
            lines = answer.aiter_lines()
            assert answer.status_code == 200 and await anext(lines) == sign
            served.fake.go_on.set()
            assert [line async for line in lines]
