"""langchain-openai: ChatOpenAI over /v1/chat/completions and over /v1/responses."""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

_QUESTION = "What is the capital of France?"


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    is_capital: bool


@tool
def get_weather(city: Literal["Paris", "London", "Berlin", "Rome"]) -> str:
    """Return the weather in a city."""
    return f"It is raining in {city}."


def _turn(city: str) -> list[Any]:
    call = {"name": "get_weather", "args": {"city": city}, "id": f"call_{city}"}
    return [HumanMessage(f"What is the weather in {city}?"), AIMessage("", tool_calls=[call])]


def _streamed(model: Any, asked: Any) -> AIMessageChunk:
    first, *others = model.stream(asked)
    assert len(others) > 4, "it came in pieces"
    for chunk in others:
        first += chunk
    return first


def _check_text(model: ChatOpenAI) -> None:
    whole, streamed = model.invoke(_QUESTION), _streamed(model, _QUESTION)
    assert "Paris" in whole.text and streamed.text == whole.text
    assert whole.usage_metadata["input_tokens"] > 10 and whole.usage_metadata["output_tokens"] > 3
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def _check_tools(model: ChatOpenAI) -> None:
    history = [message for city in ("Paris", "London", "Berlin") for message in _turn(city)]
    history.append(HumanMessage("What is the weather in Rome?"))
    bound = model.bind_tools([get_weather])
    answer = bound.invoke(history)
    (call,) = answer.tool_calls
    (streamed,) = _streamed(bound, history).tool_calls
    assert call["args"] == streamed["args"] == {"city": "Rome"} and call["name"] == "get_weather"
    assert bound.invoke([*history, answer, get_weather.invoke(call)]).text
    for choice in ("any", "get_weather"):
        forced = model.bind_tools([get_weather], tool_choice=choice, strict=True, parallel_tool_calls=False)
        (call,) = forced.invoke("Rome?").tool_calls
        assert get_weather.invoke(call).text.startswith("It is raining")


def _check_structure(model: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        bound = model.with_structured_output(City, method=method)
        assert isinstance(bound.invoke("Is Rome a capital?"), City)
        *_, last = bound.stream("Is Rome a capital?")
        assert City.model_validate(last)


for is_responses in (False, True):
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "max_retries": 0, "stream_usage": True}
    model = ChatOpenAI(model="smollm2", base_url=sys.argv[1], api_key="none", use_responses_api=is_responses, **asked)
    _check_text(model)
    _check_tools(model)
    _check_structure(model)
