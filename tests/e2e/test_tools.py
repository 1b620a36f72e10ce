"""Tool calls with real weights: SmolLM2 with its own chat template and with one that supports tools, through a whole
router."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.e2e.conftest import Lab
from tests.support.grids import quick
from tests.support.router_service import http_url, router_service
from tests.support.sdk_clients import openai_client
from tests.support.shared_clusters import SharedClusters
from tests.support.tool_clients import ASKS, SCHEMA

_TEMPLATE = Path(__file__).parent.parent / "frontend" / "chat" / "templates" / "hermes_tools.jinja"
_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def _turn(city: str) -> list[Any]:
    """Return a question and the tool call that answers it."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": city, "type": "function", "function": function}]},
    ]


@asynccontextmanager
async def _served(model_dir: Path, shared_cluster: SharedClusters, **model: Any) -> AsyncIterator[str]:
    """Serve the model and yield the router's URL. model: see router_service."""
    async with (
        shared_cluster(
            model_dir, model={"served_name": "smollm2", "dtype": "float32"}, kv={"wire_dtype": "raw"}
        ) as cluster,
        router_service(cluster, model=model) as service,
    ):
        yield http_url(service)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("template", quick([str(_TEMPLATE), None], [str(_TEMPLATE)]), ids=["hermes", "its own"])
async def test_tool_call_round_trip(smollm2_dir: Path, lab: Lab, template: str | None) -> None:
    """A greedy tool call works unary and streamed, and its result can be sent back. The prompt has example calls."""
    messages = [message for city in ("Paris", "London", "Berlin") for message in _turn(city)]
    messages.append({"role": "user", "content": "What is the weather in Rome?"})
    fields: dict[str, Any] = {"model": "smollm2", "tools": [_TOOL], "temperature": 0, "max_tokens": 48}
    async with (
        _served(smollm2_dir, lab.shared, chat_template=template) as url,
        openai_client(base_url=f"{url}/v1", api_key="none", timeout=120) as client,
    ):
        (choice,) = (await client.chat.completions.create(messages=messages, **fields)).choices
        assert choice.message.tool_calls, choice.message.content
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        async with client.chat.completions.stream(messages=messages, **fields) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        (again,) = streamed.message.tool_calls or []
        assert again.function.arguments == call.function.arguments and streamed.finish_reason == "tool_calls"
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "It is raining in Rome."}]
        answer = await client.chat.completions.create(messages=messages, **fields)
        assert answer.usage and answer.usage.prompt_tokens_details
        assert answer.usage.prompt_tokens_details.cached_tokens > 100, "the conversation must hit the prefix cache"
        for choice_of_tool in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Rome?"}], **fields}
            asked |= {"tool_choice": choice_of_tool, "parallel_tool_calls": False, "max_tokens": 200}
            (bound,) = (await client.chat.completions.create(**asked)).choices
            assert bound.message.tool_calls, bound
            (call,) = bound.message.tool_calls
            assert call.type == "function" and call.function.name == "get_weather"
            assert isinstance(json.loads(call.function.arguments)["city"], str) and not bound.message.content
        city = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
        city["additionalProperties"] = False
        form: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": city}}
        messages = [*messages[:7], {"role": "user", "content": "Which city is Italy's capital? No weather."}]
        for history in (messages, [{"role": "user", "content": "Rome, as JSON?"}]):
            asked = {"messages": history, "response_format": form, "parallel_tool_calls": False, **fields}
            (either,) = (await client.chat.completions.create(**asked)).choices
            called = [call.function.name for call in either.message.tool_calls or [] if call.type == "function"]
            assert (either.finish_reason, called) in [("tool_calls", ["get_weather"]), ("stop", [])], either
            assert called or json.loads(either.message.content or "") == {"city": "Rome"}


@pytest.mark.timeout(300)
async def test_tools_without_a_template_for_them(smollm2_dir: Path, lab: Lab) -> None:
    """The demo model's own template knows no tools. Calls are forced on every API, whole and streamed alike."""
    is_valid = Draft202012Validator(SCHEMA).is_valid
    async with _served(smollm2_dir, lab.shared, served_name="tiny") as url:
        first, *_ = ASKS.values()
        for ask in ASKS.values():
            for choice in ("required", "weather")[: 2 if ask is first else 1]:
                whole = await ask(url, choice=choice, is_strict=True, is_parallel=False, max_tokens=200)
                streamed = await ask(
                    url, choice=choice, is_strict=True, is_parallel=False, max_tokens=200, streams=True
                )
                ((name, arguments),) = whole.calls
                assert name == "weather" and is_valid(arguments) and not whole.text, whole
                assert (streamed.text, streamed.calls, streamed.end) == (whole.text, whole.calls, whole.end)
            answer = await ask(url, whole.turns, max_tokens=48)
            assert answer.text or answer.calls
