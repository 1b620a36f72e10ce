"""Installed clients of the three HTTP APIs: ask with a tool, whole or streamed, and answer its calls."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.sdk_clients import anthropic_client, openai_client

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_FUNCTION: dict[str, Any] = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}


@dataclass
class Said:
    """One answer."""

    text: str
    calls: list[tuple[str, Any]]  # name and arguments
    end: str  # reason
    turns: list[Any]  # the answer as it came, and a result for each call, for the next request


@dataclass(frozen=True)
class _Options:
    choice: str = "auto"
    streams: bool = False
    is_parallel: bool = True
    is_strict: bool = False
    max_tokens: int = 64


Ask = Callable[..., Awaitable[Said]]
_TIMEOUT_S = 120


async def _ask_chat(url: str, turns: Sequence[Any], options: _Options) -> Said:
    choice = options.choice
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}, *turns],
        "tools": [{"type": "function", "function": {**_FUNCTION, "strict": options.is_strict}}],
        "tool_choice": {"type": "function", "function": {"name": choice}} if choice == "weather" else choice,
        "parallel_tool_calls": options.is_parallel,
        "temperature": 0,
        "max_tokens": options.max_tokens,
    }
    async with openai_client(base_url=f"{url}/v1", api_key="none", timeout=_TIMEOUT_S) as client:
        if options.streams:
            async with client.chat.completions.stream(**fields) as stream:
                answer: Any = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**fields)
    (one,) = answer.choices
    said = one.message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": call.id, "content": f"result {at}"} for at, call in enumerate(said)]
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in said]
    message = {"role": "assistant", "content": one.message.content}
    if said:
        message["tool_calls"] = [call.model_dump(include={"id", "type", "function"}) for call in said]
    return Said(one.message.content or "", calls, one.finish_reason, [*turns, message, *results])


async def _ask_messages(url: str, turns: Sequence[Any], options: _Options) -> Said:
    choice = options.choice
    kind: dict[str, Any] = {"type": {"required": "any", "weather": "tool"}.get(choice, choice)}
    if choice == "weather":
        kind["name"] = choice
    if choice != "none":
        kind["disable_parallel_tool_use"] = not options.is_parallel
    tool = {"name": "weather", "description": "Of a city.", "input_schema": SCHEMA, "strict": options.is_strict}
    fields: dict[str, Any] = {
        "model": "tiny",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "hi"}, *turns],
        "tools": [tool],
        "tool_choice": kind,
        "extra_body": {"temperature": 0},
        "max_tokens": options.max_tokens,
    }
    async with anthropic_client(base_url=url, api_key="none", timeout=_TIMEOUT_S) as client:
        if options.streams:
            async with client.messages.stream(**fields) as stream:
                answer: Any = await stream.get_final_message()
        else:
            answer = await client.messages.create(**fields)
    blocks = [block.to_dict() for block in answer.content]
    said = [block for block in blocks if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    results = [
        {"type": "tool_result", "tool_use_id": one["id"], "content": f"result {at}"} for at, one in enumerate(said)
    ]
    more = [*turns, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    return Said(text, [(one["name"], one["input"]) for one in said], answer.stop_reason, more)


async def _ask_responses(url: str, turns: Sequence[Any], options: _Options) -> Said:
    choice = options.choice
    fields: dict[str, Any] = {
        "model": "tiny",
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": "hi"}, *turns],
        "tools": [{"type": "function", **_FUNCTION, "strict": options.is_strict}],
        "tool_choice": {"type": "function", "name": choice} if choice == "weather" else choice,
        "parallel_tool_calls": options.is_parallel,
        "temperature": 0,
        "max_output_tokens": options.max_tokens,
    }
    async with openai_client(base_url=f"{url}/v1", api_key="none", timeout=_TIMEOUT_S) as client:
        if options.streams:
            events: list[Any] = [event async for event in await client.responses.create(**fields, stream=True)]
            answer = events[-1].response
            deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            assert "".join(deltas) == "".join(one.arguments for one in answer.output if one.type == "function_call")
        else:
            answer = await client.responses.create(**fields)
    said = [one for one in answer.output if one.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": one.call_id, "output": f"result {at}"}
        for at, one in enumerate(said)
    ]
    more = [*turns, *(one.to_dict() for one in answer.output), *results]
    return Said(answer.output_text, [(one.name, json.loads(one.arguments)) for one in said], answer.status, more)


def _ask(api: Callable[[str, Sequence[Any], _Options], Awaitable[Said]]) -> Ask:
    """ask(url, turns, choice="weather", streams=True, ...) for one API."""
    return lambda url, turns=(), **options: api(url, turns, _Options(**options))


ASKS = {"chat": _ask(_ask_chat), "messages": _ask(_ask_messages), "responses": _ask(_ask_responses)}
