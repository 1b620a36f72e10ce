"""litellm: its providers for the OpenAI API, vLLM and Anthropic's API."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm

_URL = sys.argv[1]
_OF_OPENAI = {"model": "openai/smollm2", "api_base": _URL}
_OF_VLLM = {"model": "hosted_vllm/smollm2", "api_base": _URL}
_OF_ANTHROPIC = {"model": "anthropic/smollm2", "api_base": _URL.removesuffix("/v1")}
_COMMON: dict[str, Any] = {"api_key": "none", "temperature": 0, "max_tokens": 100, "num_retries": 0}
_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
_CITIES = ["Paris", "London", "Berlin", "Rome"]
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": _CITIES}}, "required": ["city"]},
    },
}


def _turn(city: str) -> list[Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": city, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": city, "content": f"It is raining in {city}."},
    ]


def _check_text(way: dict[str, Any]) -> None:
    whole = litellm.completion(messages=_QUESTION, **way, **_COMMON)
    assert "Paris" in whole.choices[0].message.content and whole.choices[0].finish_reason == "stop"
    options = {"include_usage": True}
    chunks = list(litellm.completion(messages=_QUESTION, stream=True, stream_options=options, **way, **_COMMON))
    built = litellm.stream_chunk_builder(chunks)
    assert len(chunks) > 4 and built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == whole.usage.completion_tokens > 3
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens > 10


def _check_tools(way: dict[str, Any]) -> None:
    asked = {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False, **way, **_COMMON}
    history = [*_turn("Paris"), {"role": "user", "content": "What is the weather in Rome?"}]
    (choice,) = litellm.completion(messages=history, **asked).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and json.loads(call.function.arguments)["city"] in _CITIES
    built = litellm.stream_chunk_builder(list(litellm.completion(messages=history, stream=True, **asked)))
    assert built.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    history += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "It is raining in Rome."}]
    assert litellm.completion(messages=history, tools=[_TOOL], **way, **_COMMON).choices[0].message.content


def _check_errors() -> None:
    for wrong, status in (({"temperature": -1}, 400), ({"model": "openai/other"}, 404)):
        try:
            litellm.completion(messages=_QUESTION, **{**_OF_OPENAI, **_COMMON, **wrong})
        except (litellm.BadRequestError, litellm.NotFoundError) as error:
            assert error.status_code == status and ("temperature" in str(error) or "other" in str(error)), error
        else:
            raise AssertionError(f"{wrong} was taken")


async def _check_async() -> None:
    stream = await litellm.acompletion(messages=_QUESTION, stream=True, **_OF_OPENAI, **_COMMON)
    assert "Paris" in "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def _check_others() -> None:
    text = litellm.text_completion(prompt="The capital of France is", **_OF_OPENAI, **_COMMON)
    assert "Paris" in text.choices[0].text
    of_responses = {"api_key": "none", "temperature": 0, "max_output_tokens": 32, **_OF_OPENAI}
    assert "Paris" in litellm.responses(input=_QUESTION, **of_responses).output[0].content[0].text
    *_, last = litellm.responses(input=_QUESTION, stream=True, **of_responses)
    assert last.type == "response.completed"


for way in (_OF_OPENAI, _OF_VLLM, _OF_ANTHROPIC):
    _check_text(way)
    _check_tools(way)
_check_errors()
_check_others()
asyncio.run(_check_async())
