"""Tools with OpenAI's client: calls in answers and in the history, whole and streamed; thinking."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from core.rpc import inference_pb2 as pb
from core.spec.schema import RouterSpec
from frontend.grpc.messages import chat_of
from frontend.text.tokenizer import Tokenizer
from tests.support.serving import TEMPLATES, USER, Serve, Served

_HERMES = TEMPLATES["hermes_tools"]
_PARIS = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Paris 🎉", "days": 3}}\n</tool_call>'
_LYON = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Lyon"}}\n</tool_call>'


class Weather(BaseModel):
    """Weather of a city."""

    city: str
    days: int | None = None


_TOOL = openai.pydantic_function_tool(Weather)


@pytest.fixture
async def endpoint(serve: Serve) -> Served:
    return await _served(serve)


async def _served(serve: Serve, template: str = _HERMES) -> Served:
    return await serve(chat_template=template, max_context=4096)


def _calls(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


async def test_calls_whole_and_streamed(endpoint: Served, byte_level: Tokenizer) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [_TOOL]}
    expected = [("Weather", {"city": "Paris 🎉", "days": 3}), ("Weather", {"city": "Lyon"})]
    for text in ("", "Let me look."):
        endpoint.say(f"{text}\n{_PARIS}\n{_LYON}\n")
        (choice,) = (await endpoint.client.chat.completions.create(**fields)).choices
        assert (choice.message.content, choice.finish_reason) == (text or None, "tool_calls")
        assert _calls(choice.message) == expected
        assert len({call.id for call in choice.message.tool_calls or []}) == 2
        async with endpoint.client.chat.completions.stream(**fields) as stream:
            pieces = [event async for event in stream]
            final = (await stream.get_final_completion()).choices[0]
        assert (final.message.content or "", final.finish_reason) == (text, "tool_calls")
        assert _calls(final.message) == expected
        deltas = [event.arguments_delta for event in pieces if event.type == "tool_calls.function.arguments.delta"]
        assert len(deltas) > 10, "arguments come as they are made"
    prompt = byte_level.decode(endpoint.fake.started[0].token_ids, skip_special_tokens=False)
    assert '{"type": "function", "function": {"name": "Weather", "description": "Weather of a city.", "para' in prompt
    assert '"strict"' not in prompt


@pytest.mark.parametrize("together", [2, 7, 1000])
async def test_each_chunk_has_one_call(endpoint: Served, byte_level: Tokenizer, together: int) -> None:
    """Several calls arrive at once with jump-forward tokens. Some clients read only the first call of a chunk."""
    fields: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [_TOOL], "stream": True, "logprobs": True}
    endpoint.fake.together = together
    endpoint.say(f"Let me look.\n{_PARIS}\n{_LYON}\n")
    said, num_tokens = dict[int, str](), 0
    async for chunk in await endpoint.client.chat.completions.create(**fields):
        for choice in chunk.choices:
            num_tokens += len(choice.logprobs.content or []) if choice.logprobs else 0
            for call in (choice.delta.tool_calls or [])[:1]:
                said[call.index] = said.get(call.index, "") + ((call.function and call.function.arguments) or "")
    assert [json.loads(text) for text in said.values()] == [{"city": "Paris 🎉", "days": 3}, {"city": "Lyon"}]
    assert num_tokens == len(byte_level.encode(f"Let me look.\n{_PARIS}\n{_LYON}\n<|im_end|>"))


async def test_unknown_forbidden_and_cut_calls_are_text(endpoint: Served) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [_TOOL]}
    for text, more in ((_PARIS.replace("Weather", "Whether"), {}), (_PARIS, {"tool_choice": "none"})):
        endpoint.say(text)
        (choice,) = (await endpoint.client.chat.completions.create(**fields, **more)).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    assert "Weather" not in endpoint.prompt, "a tool that may not be called is not shown"
    cut = await endpoint.client.chat.completions.create(**fields, max_tokens=12)
    assert _PARIS.startswith(cut.choices[0].message.content or "?") and cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("is_open", [False, True])
async def test_thinking_is_separated(serve: Serve, byte_level: Tokenizer, is_open: bool) -> None:
    """The opening marker comes from the model or from the template."""
    end = "{{ '<think>\\n' if add_generation_prompt }}" if is_open else ""
    endpoint = await _served(serve, _HERMES + "{# </think> #}" + end)
    endpoint.say(f"{'' if is_open else '<think>'}\nHm, < 3?\n</think>\n\nYes.\n{_LYON}")
    fields: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": [_TOOL]}
    whole = await endpoint.client.chat.completions.create(**fields)
    (choice,) = whole.choices
    assert whole.usage and whole.usage.completion_tokens_details
    thought_ids = byte_level.encode("<think>\nHm, < 3?\n</think>")
    least = len(thought_ids) - 10  # a split marker counts from its last token
    assert least <= (whole.usage.completion_tokens_details.reasoning_tokens or 0) <= len(thought_ids)
    assert (choice.message.content, _calls(choice.message)) == ("Yes.", [("Weather", {"city": "Lyon"})])
    extra = choice.message.model_extra or {}
    assert extra["reasoning_content"] == extra["reasoning"] == "Hm, < 3?"
    thought = said = ""
    async for chunk in await endpoint.client.chat.completions.create(**fields, stream=True):
        thought += (chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "")
        said += chunk.choices[0].delta.content or ""
    assert (thought, said) == ("Hm, < 3?", "Yes.")
    hidings: list[dict[str, Any]] = [{"include_reasoning": False}, {"reasoning": {"exclude": True}}]
    for hiding in hidings:
        for stream in (False, True):
            body = {**fields, **hiding, "stream": stream, "max_tokens": 512}
            answer = await endpoint.http.post("/v1/chat/completions", json=body)
            assert '"finish_reason":"tool_calls"' in answer.text
            assert '"reasoning_content"' not in answer.text and '"reasoning"' not in answer.text


_READS_CONTENT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content.strip() + (m['content'] | trim) }}{% if 'x' in m.content %}"
    "{% endif %}{{ m.content if m.content is string else m.content[0].text }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{% endfor %};{% endfor %}{{ '<tool_call>' if tools }}"
)
_BLANK: list[dict[str, Any]] = [{}, *({"content": one} for one in (None, "", "\n", [], [{"type": "text", "text": ""}]))]


@pytest.mark.parametrize("template", [_READS_CONTENT, _HERMES], ids=["reads the content", "hermes"])
async def test_blank_content_is_taken(serve: Serve, template: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "Weather", "arguments": "{}"}}
    prompts = set[str]()
    endpoint = await _served(serve, template)
    for blank in _BLANK:
        called = {"role": "assistant", "tool_calls": [call], **blank}
        result = {"role": "tool", "tool_call_id": "a", **blank}
        messages = [*USER, called, result, {"role": "assistant", "tool_calls": [], **blank}, *USER]
        answer = await endpoint.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        prompt = endpoint.prompt
        prompts.add(prompt.replace("\n", ""))
    (prompt,) = prompts
    assert "Weather" in prompt and "None" not in prompt


_PICKY = (  # as in Mistral Small 4: off unless asked for, and two values only
    "{% set e = reasoning_effort or 'none' %}{% if e not in ('none', 'high') %}{{ raise_exception('no') }}{% endif %}"
    "{{ 'E:' ~ e }}"
)
_EFFORT = "reasoning_effort"
_OFF: Any = {"type": "disabled"}
_ON: Any = {"type": "enabled", "budget_tokens": 9}
_EFFORTS: list[tuple[str, dict[str, Any], str, str]] = [  # template, fields, end of the prompt, fields without effect
    ("{{ 'E:' ~ reasoning_effort }}", {_EFFORT: "low"}, "E:low", ""),
    ("{{ 'E:' ~ reasoning_effort }}", {_EFFORT: "none"}, "E:none", ""),
    ("{{ 'E:' ~ reasoning_effort }}", {"reasoning": {"effort": "low"}}, "E:low", ""),
    (_PICKY, {}, "E:none", ""),
    (_PICKY, {_EFFORT: "medium"}, "E:high", ""),
    (_PICKY, {_EFFORT: "minimal"}, "E:none", ""),
    (_PICKY, {"thinking": _ON}, "E:high", ""),
    (_PICKY, {"enable_thinking": True}, "E:high", ""),
    ("{{ 'T:' ~ enable_thinking }}{# </think> #}", {_EFFORT: "none"}, "T:False", ""),
    ("{{ 'T:' ~ enable_thinking }}{# </think> #}", {_EFFORT: "low"}, "T:True", ""),
    ("{{ 'T:' ~ enable_thinking }}{# </think> #}", {"enable_thinking": False}, "T:False", ""),
    ("{{ 'T:' ~ enable_thinking }}{# </think> #}", {"thinking": _OFF}, "T:False", ""),
    ("{{ 'T:' ~ thinking }}{# </think> #}", {"reasoning": {"enabled": True}}, "T:True", ""),
    ("{{ 'T:' ~ thinking }}{# </think> #}", {_EFFORT: "xhigh"}, "T:True", ""),
    ("{{ 'hi' }}{# </think> #}", {_EFFORT: "none"}, "hi", _EFFORT),
    ("{{ 'hi' }}{# </think> #}", {_EFFORT: "low"}, "hi", _EFFORT),
    ("{{ 'hi' }}{# </think> #}", {"thinking": {"type": "enabled"}}, "hi", ""),
    ("{{ 'hi' }}", {_EFFORT: "none"}, "hi", ""),
    ("{{ 'hi' }}", {_EFFORT: "low"}, "hi", _EFFORT),
    ("{{ 'hi' }}", {"thinking": _OFF}, "hi", ""),
    ("{{ 'hi' }}", {"thinking": _ON}, "hi", "thinking"),
    ("{{ 'hi' }}", {"reasoning": {"effort": "high"}}, "hi", "reasoning.effort"),
]


@pytest.mark.parametrize(("template", "fields", "prompt", "ignored"), _EFFORTS)
async def test_thinking_fields_reach_the_template(
    serve: Serve,
    template: str,
    fields: dict[str, Any],
    prompt: str,
    ignored: str,
) -> None:
    endpoint = await _served(serve, template)
    body = {"messages": USER, "max_tokens": 1, **fields}
    for more in ({}, {"stream": True}):
        answer = await endpoint.http.post("/v1/chat/completions", json=body | more)
        assert answer.status_code == 200, answer.text
        assert endpoint.prompt == prompt
        assert answer.headers.get("x-ignored-fields", "") == ignored


async def test_unknown_fields_are_ignored_and_listed(endpoint: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}], "mood": 1}],
        "max_tokens": 1,
        "x\r\ny": 1,
    }
    for more in ({}, {"stream": True, "stream_options": {"include_obfuscation": False}}):
        answer = await endpoint.http.post("/v1/chat/completions", json={**body, **more})
        assert answer.status_code == 200
        named = set(answer.headers["x-ignored-fields"].split(", "))
        assert {"x??y", "messages[0].mood", "messages[0].content[0].cache_control"} <= named
    answer = await endpoint.http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1})
    assert "x-ignored-fields" not in answer.headers


async def test_unknown_fields_are_rejected_with_their_path(serve: Serve) -> None:
    http = (await serve(spec=RouterSpec(unknown_fields="refuse"))).http
    for unknown, param in (
        ({"mood": 1}, "mood"),
        ({"response_format": {"type": "text", "a": 1}}, "response_format.a"),
    ):
        answer = await http.post("/v1/chat/completions", json={"messages": USER, **unknown})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["message"]) == (400, param, f"{param}: unknown field")


async def test_grpc_tools(endpoint: Served) -> None:
    """Calls and their results in both directions; an error names its field."""
    endpoint.say(f"Well.{_PARIS}{_LYON}")
    tool = pb.Tool(name="Weather", description="Weather of a city.", parameters=json.dumps(Weather.model_json_schema()))
    called = pb.ToolCall(id="a", name="Weather", arguments='{"city": "Rome"}')
    messages = [
        pb.ChatMessage(role="user", content="hi"),
        pb.ChatMessage(role="assistant", tool_calls=[called]),
        pb.ChatMessage(role="tool", tool_call_id="a", content="sunny"),
    ]
    events = await endpoint.generate(pb.GenerateRequest(chat=pb.Chat(messages=messages, tools=[tool])))
    calls = [call for event in events for call in event.delta.tool_calls]
    assert [(call.index, call.name) for call in calls if call.id] == [(0, "Weather"), (1, "Weather")]
    assert json.loads("".join(call.arguments for call in calls if call.index)) == {"city": "Lyon"}
    assert "".join(event.delta.text for event in events) == "Well."
    assert events[-2].finished.finish_reason == "tool_calls"
    assert '"arguments": {"city": "Rome"}}\n</tool_call>' in endpoint.prompt
    assert "<tool_response>\nsunny" in endpoint.prompt
    chat = pb.Chat(
        messages=[
            pb.ChatMessage(role="user", content="hi", name="ann"),
            pb.ChatMessage(role="assistant", content="I", reasoning_content="so"),
        ],
        tools=[tool],
        tool_choice=pb.ToolChoice(none=True),
        template_variables='{"enable_thinking": false}',
        continue_final_message=True,
    )
    await endpoint.generate(pb.GenerateRequest(chat=chat, sampling=pb.SamplingParams(truncate_prompt_tokens=3)))
    assert endpoint.prompt == "istant\nI"
    call = endpoint.call(pb.GenerateRequest(chat=pb.Chat(messages=messages[:1], reasoning_effort="high")))
    assert tuple(await call.initial_metadata()) == (("x-ignored-fields", "reasoning_effort"),)
    [one async for one in call]
    made = chat_of(chat)
    assert (made.tools, made.variables, made.messages[0]["name"]) == ((), {"enable_thinking": False}, "ann")
    assert made.messages[1]["reasoning_content"] == "so"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"template_variables": "[]"}, "chat.template_variables"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "chat.continue_final_message"),
        ({"tool_choice": pb.ToolChoice(name="other"), "tools": [tool]}, "chat.tool_choice"),
        ({"tool_choice": pb.ToolChoice(required=True)}, "chat.tool_choice"),
        ({"tool_choice": pb.ToolChoice(required=True), "tools": [tool]}, "chat.tools"),
        ({"tools": [pb.Tool(name="a b")]}, "chat.tools[0].name"),
        ({"tools": [pb.Tool(name="a", parameters="[]")]}, "chat.tools[0].parameters"),
    ]
    for fields, param in wrong:
        rejected = await endpoint.rejected(pb.GenerateRequest(chat=pb.Chat(messages=messages, **fields)))
        assert rejected.fields == [param]
