"""Anthropic's Messages API with its own client: whole and streamed answers, tools, thinking, errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from core.spec.schema import RouterSpec
from core.types.errors import CapacityError, RateLimited, ReplicaLost, RequestError
from frontend.anthropic.types import MessagesBody
from frontend.chat.chat import Chat
from frontend.openai.types import ChatBody
from frontend.text.tokenizer import Tokenizer
from tests.frontend.access.keys import access_with, issue
from tests.support.serving import TEMPLATES, USER, Serve, Served

_HERMES = TEMPLATES["hermes_tools"]
_PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 🎉", "days": 3}}\n</tool_call>'
_LYON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lyon"}}\n</tool_call>'
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
_TOOL: Any = {"name": "weather", "description": "Of a city.", "input_schema": _SCHEMA, "cache_control": None}


class City(BaseModel):
    name: str


@pytest.fixture
async def endpoint(serve: Serve) -> Served:
    return await _served(serve)


async def _served(serve: Serve, template: str = _HERMES, **options: Any) -> Served:
    return await serve(**{"chat_template": template, "max_context": 4096} | options)


async def _rejected(endpoint: Served, body: dict[str, Any], path: str = "/v1/messages") -> tuple[int, str, str]:
    answer = await endpoint.http.post(path, json={"max_tokens": 8, "messages": USER, **body})
    told = answer.json()
    assert told["type"] == "error" and told["request_id"] == answer.headers["request-id"]
    return answer.status_code, told["error"]["type"], told["error"]["message"]


def _content_of(message: Any) -> dict[str, Any]:
    """Return the content without the values unique to each answer."""
    told = message.model_dump(exclude_none=True)
    told.pop("id")
    told["content"] = [{name: value for name, value in block.items() if name != "id"} for block in told["content"]]
    return dict(told)


async def test_text_whole_and_streamed(endpoint: Served, byte_level: Tokenizer) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 64,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "text", "text": "there"}]},
        ],
        "metadata": {"user_id": "ann"},
        "extra_body": {"temperature": 0.5, "top_p": 0.9, "top_k": 7},
    }
    endpoint.say("It is Paris. 🎉")
    answered = await endpoint.anthropic().messages.with_raw_response.create(**fields)
    whole = await answered.parse()
    assert endpoint.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi\nthere<|im_end|>\n<|im_start|>assistant\n"
    )
    (asked,) = endpoint.fake.started
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.5, 0.9, 7)
    assert (asked.user, asked.sampling.max_tokens) == ("ann", 64)
    assert [block.to_dict() for block in whole.content] == [{"type": "text", "text": "It is Paris. 🎉"}]
    assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("end_turn", None, "assistant")
    assert whole.id == f"msg_{answered.request_id}" and whole.model == "tiny"
    used = whole.usage
    assert used.cache_read_input_tokens == 3 and used.cache_creation_input_tokens == 0
    assert used.input_tokens + 3 == len(asked.token_ids)
    assert used.output_tokens == len(byte_level.encode("It is Paris. 🎉<|im_end|>"))
    async with endpoint.anthropic().messages.stream(**fields) as stream:
        assert "".join([text async for text in stream.text_stream]) == "It is Paris. 🎉"
        assert _content_of(await stream.get_final_message()) == _content_of(whole)
    prompt = {name: fields[name] for name in ("model", "system", "messages")}
    counted = await endpoint.anthropic().messages.count_tokens(**prompt)
    assert counted.input_tokens == len(asked.token_ids) and len(endpoint.fake.started) == 2


async def test_stop_reasons(endpoint: Served, byte_level: Tokenizer) -> None:
    ends: list[tuple[dict[str, Any], str, str, str | None]] = [
        ({"stop_sequences": ["is", "zzz"]}, "It ", "stop_sequence", "is"),
        ({"max_tokens": 2}, byte_level.decode(byte_level.encode("It is Paris.")[:2]), "max_tokens", None),
        ({}, "It is Paris.", "end_turn", None),
    ]
    endpoint.say("It is Paris.")
    for fields, text, reason, stop in ends:
        asked: Any = {"model": "tiny", "max_tokens": 64, "messages": USER, **fields}
        whole = await endpoint.anthropic().messages.create(**asked)
        assert (whole.content[0].to_dict()["text"], whole.stop_reason, whole.stop_sequence) == (text, reason, stop)
        async with endpoint.anthropic().messages.stream(**asked) as stream:
            assert _content_of(await stream.get_final_message()) == _content_of(whole)
    endpoint.say("")
    nothing = await endpoint.anthropic().messages.create(model="tiny", max_tokens=8, messages=USER)
    assert nothing.content == [] and nothing.stop_reason == "end_turn"
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    await endpoint.anthropic().messages.create(model="tiny", max_tokens=8, messages=begun)
    assert endpoint.prompt.endswith("<|im_start|>assistant\nIt is"), "the answer continues it"


async def test_calls_whole_and_streamed(endpoint: Served, byte_level: Tokenizer) -> None:
    fields: Any = {"model": "tiny", "max_tokens": 512, "messages": USER, "tools": [_TOOL]}
    endpoint.say(f"Let me look.\n{_PARIS}\n{_LYON}\n")
    whole = await endpoint.anthropic().messages.create(**fields)
    told = [block.input if block.type == "tool_use" else block.to_dict()["text"] for block in whole.content]
    assert told == ["Let me look.", {"city": "Paris 🎉", "days": 3}, {"city": "Lyon"}]
    assert whole.stop_reason == "tool_use"
    async with endpoint.anthropic().messages.stream(**fields) as stream:
        pieces = [event.partial_json async for event in stream if event.type == "input_json"]
        final = await stream.get_final_message()
    assert _content_of(final) == _content_of(whole) and len(pieces) > 10, "arguments come as they are made"
    assert all(block.name == "weather" and block.id for block in final.content if block.type == "tool_use")
    endpoint.say(f"{_PARIS}\n{_LYON}")
    cut = await endpoint.anthropic().messages.create(**{**fields, "max_tokens": len(byte_level.encode(_PARIS)) + 3})
    assert (cut.content[0].type, cut.stop_reason) == ("tool_use", "max_tokens")


async def test_answer_follows_a_schema(serve: Serve) -> None:
    endpoint = await _served(serve, has_grammars=True)
    endpoint.say('{"name": "Rome"}')
    answer = await endpoint.anthropic().messages.parse(model="tiny", max_tokens=64, messages=USER, output_format=City)
    assert answer.parsed_output == City(name="Rome")
    grammar = endpoint.fake.started[-1].grammar
    assert grammar is not None and '"name"' in grammar.text


_TWO_ANSWERED: list[dict[str, Any]] = [
    *USER,
    {"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "f", "input": {}} for id in ("a", "b")]},
    {"role": "user", "content": [*({"type": "tool_result", "tool_use_id": id, "content": id,
     "is_error": False} for id in ("a", "b")), {"type": "text", "text": "So?"}]},
]  # fmt: skip
_TWO_ANSWERED_IN_A_CHAT = [
    *USER,
    {"role": "assistant", "tool_calls": [{"id": id, "function": {"name": "f", "arguments": "{}"}} for id in "ab"]},
    *({"role": "tool", "tool_call_id": id, "content": id} for id in "ab"),
    {"role": "user", "content": "So?"},
]


def test_request_equals_that_of_a_chat() -> None:
    """Grammar and messages equal those of an equivalent /v1/chat/completions request."""
    function = {"name": "weather", "description": "Of a city.", "parameters": _SCHEMA}
    tools = [{"type": "function", "function": function}]
    both: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "tools": [_TOOL]},
         {"tool_choice": "required", "parallel_tool_calls": False, "tools": tools}),
        ({"tool_choice": {"type": "tool", "name": "weather"}, "tools": [_TOOL]},
         {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "tools": tools}),
        ({"stop_sequences": ["a"], "seed": 3, "cache_salt": "s", "priority": 2, "metadata": {"user_id": "u"}},
         {"stop": "a", "seed": 3, "cache_salt": "s", "priority": 2, "user": "u"}),
        ({"system": ""}, {}),
        ({"system": "Be."}, {"messages": [{"role": "system", "content": "Be."}, *USER]}),
        ({"messages": _TWO_ANSWERED}, {"messages": _TWO_ANSWERED_IN_A_CHAT}),
    ]  # fmt: skip
    for ours, chats in both:
        (one,) = MessagesBody.model_validate({"max_tokens": 8, "messages": USER, **ours}).requests("r")
        (other,) = ChatBody.model_validate({"max_tokens": 8, "messages": USER, **chats}).requests("r")
        assert isinstance(one.prompt, Chat) and isinstance(other.prompt, Chat)
        assert one.prompt.messages == other.prompt.messages and one.prompt.tools == other.prompt.tools
        assert one.prompt.is_parallel == other.prompt.is_parallel and one.prompt.forced == other.prompt.forced
        for name in ("grammar", "stop", "seed", "cache_salt", "priority", "user", "max_tokens"):
            assert getattr(one, name) == getattr(other, name)


def test_merged_messages_keep_their_thoughts_texts_and_calls() -> None:
    said: list[Any] = [
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": f"{n}?", "signature": ""}, {"type": "text", "text": n},
            {"type": "tool_use", "id": n, "name": n, "input": {}},
        ]}
        for n in "ab"
    ]  # fmt: skip
    results = [{"type": "tool_result", "tool_use_id": n, "content": n} for n in "ab"]
    body = {"max_tokens": 8, "messages": [*USER, *said, {"role": "user", "content": results}]}
    (request,) = MessagesBody.model_validate(body).requests("r")
    assert isinstance(request.prompt, Chat)
    _, merged, *answered = request.prompt.messages
    assert (merged["content"], merged["reasoning_content"]) == ("a\nb", "a?\nb?")
    assert [call["id"] for call in merged["tool_calls"]] == [one["tool_call_id"] for one in answered] == ["a", "b"]


async def test_thinking_has_its_own_block(serve: Serve) -> None:
    template = _HERMES.replace("{%- if message.content %}", "{{- message.reasoning_content }}{%- if message.content %}")
    endpoint = await _served(serve, template + "{# </think> #}", has_grammars=True)
    endpoint.say(f"<think>\nHm, < 3?\n</think>\n\nYes.\n{_LYON}")
    fields: Any = {"model": "tiny", "max_tokens": 256, "messages": USER, "tools": [_TOOL]}
    for thinking, thought in (
        ({"type": "enabled", "budget_tokens": 1024}, "Hm, < 3?"),
        ({"type": "adaptive", "display": "omitted"}, ""),
    ):
        whole = await endpoint.anthropic().messages.create(**fields, thinking=thinking)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        block: Any = whole.content[0]
        assert (block.thinking, bool(block.signature)) == (thought, True)
        assert whole.usage.output_tokens_details and whole.usage.output_tokens_details.thinking_tokens > 3
        async with endpoint.anthropic().messages.stream(**fields, thinking=thinking) as stream:
            assert _content_of(await stream.get_final_message()) == _content_of(whole)
    answer: Any = {"role": "assistant", "content": [{**block.to_dict(), "thinking": "Hm!"}, *whole.content[1:2]]}
    await endpoint.anthropic().messages.create(**{**fields, "messages": [*USER, answer, *USER]})
    assert "<|im_start|>assistantHm!\nYes.<|im_end|>" in endpoint.prompt


_SWITCH = "{{ '<|im_start|>assistant' ~ ('<think>' if thinking else '</think>') }}"  # as in DeepSeek V3.1
_THINKING: Any = {  # by template: request fields and the end of the prompt; with an asterisk: the field has no effect
    "{{ 'E:' ~ reasoning_effort }}": {"disabled": "E:none", "enabled": "E:*", "high": "E:high"},
    "{{ 'T:' ~ enable_thinking }}{# </think> #}": {"disabled": "T:False", "enabled": "T:True", "adaptive": "T:True"},
    _SWITCH: {"disabled": "</think>", "enabled": "<think>", "adaptive": "<think>", "high": "<think>"},
    "{{ 'hi' }}{# </think> #}": {"disabled": "hi*", "enabled": "hi", "adaptive": "hi", "high": "hi*"},
    "{{ 'hi</think>' }}": {"disabled": "hi</think>", "enabled": "hi</think>*", "high": "hi</think>*"},
    "{{ 'hi' }}": {"disabled": "hi", "enabled": "hi*", "adaptive": "hi*", "high": "hi*"},
}


@pytest.mark.parametrize("template", _THINKING)
async def test_thinking_is_requested_from_the_template(serve: Serve, template: str) -> None:
    endpoint = await _served(serve, template)
    for asked, prompt in _THINKING[template].items():
        body = {"output_config": {"effort": asked}} if asked == "high" else {"thinking": {"type": asked}}
        told = await endpoint.http.post("/v1/messages", json={"max_tokens": 1, "messages": USER, **body})
        field = "output_config.effort" if asked == "high" else "thinking"
        assert endpoint.prompt.endswith(prompt.removesuffix("*")), asked
        assert told.headers.get("x-ignored-fields") == (field if prompt.endswith("*") else None), asked


_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": [_IMAGE]}]}, "messages[0].content[0].type: blocks of type 'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type: blocks of"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
     "messages[0].content[0].type: tool_use is not allowed"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: required"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}]}, "messages[0].content[0].n"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "b", "input": {}}]}]}, "messages: "),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "b", "input": {}}] * 513}]},
     "messages[0].content: has 513"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "a"}] * 4097}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"system": [_IMAGE]}, "system[0].type: should be 'text'"),
    ({"system": [{}] * 2**17}, "system: at most 131072 values"),
    ({"system": "a" * 300_000}, "this model's context"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"metadata": {"user_id": "a" * 257}}, "metadata.user_id"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [_TOOL, _TOOL]}, "tools: the name 'weather' appears twice"),
    ({"tools": [_TOOL] * 513}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: requires tools"),
    ({"tool_choice": {"type": "tool"}, "tools": [_TOOL]}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "b"}, "tools": [_TOOL]}, "tool_choice: tool 'b' not found"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema: "),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"container": "a"}, "container"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
]  # fmt: skip


def _document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


_OMITTED = "[{} omitted: this model reads text only]"
_READ: list[tuple[dict[str, Any], str, bool]] = [  # a block, what the model reads, whether the user may send it
    (_document({"type": "text", "data": "TEXT"}), "TEXT", True),
    (_document({"type": "text", "data": "TEXT"}, title="T", context="C"), '{"title": "T", "context": "C"}\nTEXT', True),
    (_document({"type": "content", "content": "TEXT"}), "TEXT", True),
    (_document({"type": "content", "content": [{"type": "text", "text": "TEXT"}, _IMAGE]}),
     f"TEXT\n{_OMITTED.format('image')}", True),
    (_document({"type": "base64", "data": ""}, title="T"), _OMITTED.format("document"), False),
    ({"type": "web_search_tool_result_error", "error_code": "unavailable"}, '{"error_code": "unavailable"}', True),
]  # fmt: skip


@pytest.mark.parametrize(("block", "read", "is_allowed"), _READ)
async def test_documents_are_read_as_text(endpoint: Served, block: Any, read: str, is_allowed: bool) -> None:
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    for messages in ([{"role": "user", "content": [block]}], [*USER, called, {"role": "user", "content": [result]}]):
        answer = await endpoint.http.post("/v1/messages", json={"max_tokens": 1, "messages": messages})
        assert answer.status_code == (200 if is_allowed or len(messages) > 1 else 400)
        assert answer.status_code == 400 or read in endpoint.prompt


async def test_invalid_requests_are_rejected_by_name(serve: Serve) -> None:
    endpoint = await _served(serve, has_grammars=True)
    for body, message in _WRONG:
        status, kind, told = await _rejected(endpoint, body)
        assert (status, kind) == (400, "invalid_request_error") and told.startswith(message), told
    assert (await _rejected(endpoint, {"container": "a"}, "/v1/messages?beta=true"))[0] == 400
    for body in ({"messages": [{"role": "user", "content": [_IMAGE]}]}, {"tools": [{"name": "a b"}]}):
        assert (await _rejected(endpoint, body, "/v1/messages/count_tokens"))[0] == 400
    assert not endpoint.fake.started
    assert await _rejected(endpoint, {"model": "claude"}) == (
        404, "not_found_error", "model 'claude' is not served here; 'tiny' is")  # fmt: skip
    assert (await _rejected(endpoint, {"x": "y" * 11_000_000}))[:2] == (413, "request_too_large")
    wrong = await endpoint.http.get("/v1/messages")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")


async def test_errors_map_to_the_clients_classes(endpoint: Served) -> None:
    raised: list[tuple[Exception, type[anthropic.APIStatusError], str]] = [
        (CapacityError("full", retry_after_s=2), anthropic.OverloadedError, "overloaded_error"),
        (RateLimited("yours", retry_after_s=2), anthropic.RateLimitError, "rate_limit_error"),
        (ReplicaLost("gone"), anthropic.ServiceUnavailableError, "api_error"),
        (RequestError("wrong"), anthropic.BadRequestError, "invalid_request_error"),
        (OSError("a bug's own words"), anthropic.InternalServerError, "api_error"),
    ]
    fields: Any = {"model": "tiny", "max_tokens": 32, "messages": USER}
    for error, kind, word in raised:
        endpoint.fake.reject = error
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                await endpoint.anthropic().messages.create(**fields, stream=stream)
            assert (caught.value.type, "own words" in caught.value.message) == (word, False)
            assert caught.value.request_id
            if isinstance(error, CapacityError):
                assert caught.value.response.headers["retry-after"] == "2"
    endpoint.fake.reject, endpoint.fake.fail_after = None, (3, ReplicaLost("gone"))
    with pytest.raises(anthropic.APIStatusError) as caught:
        async with endpoint.anthropic().messages.stream(**fields) as streamed:
            async for _ in streamed:
                pass
    assert (caught.value.type, caught.value.api_message, caught.value.status_code) == ("api_error", "gone", 200)
    answer = await endpoint.http.post("/v1/messages", json={**fields, "stream": True})
    *_, last = answer.text.strip().split("\n\n")
    name, told = last.split("\n")
    assert name == "event: error" and answer.text.startswith("event: message_start\n")
    assert json.loads(told.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "gone"},
        "request_id": answer.headers["request-id"],
    }


async def test_key_is_accepted_in_either_header(serve: Serve) -> None:
    known, other = issue("acme"), issue("other")
    access = access_with(known, other)
    endpoint = await _served(serve, access=access)
    fields: Any = {"model": "tiny", "max_tokens": 1, "messages": USER}
    await endpoint.anthropic(known).messages.create(**fields)
    headers: list[tuple[dict[str, str], int]] = [
        ({"x-api-key": known.secret}, 200),
        ({"x-api-key": known.secret, "authorization": known.header}, 200),
        ({"x-api-key": known.secret, "authorization": "Basic abc"}, 200),
        ({"x-api-key": known.secret, "authorization": other.header}, 401),
        ({"x-api-key": "sk-unknown"}, 401),
        ({"x-api-key": "", "authorization": known.header}, 200),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ]
    for given, status in headers:
        answer = await endpoint.http.post("/v1/messages", json=fields, headers=given)
        assert answer.status_code == status, given
        if status == 401:
            assert answer.json()["error"]["type"] == "authentication_error"
    assert {one.tenant for one in endpoint.fake.started} == {"acme"}
    answer = await endpoint.http.get("/v1/models", headers={"x-api-key": known.secret})
    assert answer.status_code == 200
    with pytest.raises(anthropic.AuthenticationError):
        await endpoint.anthropic(issue("wrong")).messages.count_tokens(model="tiny", messages=USER)


@pytest.mark.parametrize("treatment", ["ignore", "refuse"])
async def test_unknown_fields(serve: Serve, treatment: Any) -> None:
    content = [{"type": "text", "text": "hi", "mood": 1, "cache_control": {"type": "ephemeral"}}]
    body: Any = {"messages": [{"role": "user", "content": content}], "tools": [{**_TOOL, "input_examples": []}]}
    endpoint = await _served(serve, spec=RouterSpec(unknown_fields=treatment))
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        if treatment == "refuse":
            assert (await _rejected(endpoint, body, path))[:2] == (400, "invalid_request_error")
            continue
        body |= {"max_tokens": 1} if path == "/v1/messages" else {}
        answer = await endpoint.http.post(path, json=body, headers={"anthropic-version": "2023-06-01"})
        named = set(answer.headers["x-ignored-fields"].split(", "))
        assert answer.status_code == 200
        assert named - {"max_tokens"} == {"messages[0].content[0].mood", "tools[0].input_examples"}


async def test_each_token_of_a_block_is_one_small_event(endpoint: Served) -> None:
    endpoint.say("a b\n\u2028c")
    answer = await endpoint.http.post("/v1/messages", json={"max_tokens": 99, "messages": USER, "stream": True})
    events = [event.split("\n") for event in answer.text.strip().split("\n\n")]
    told = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name for name, _ in events] == [f"event: {one['type']}" for one in told]
    kinds = [one["type"] for one in told]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"} and "[DONE]" not in answer.text
    assert "".join(one["delta"]["text"] for one in told[2:-3]) == "a b\n\u2028c"
    assert told[0]["message"]["usage"]["input_tokens"] == len(endpoint.fake.started[0].token_ids)
