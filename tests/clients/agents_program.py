"""openai-agents: an agent with a tool, over both kinds of OpenAI models, whole and streamed."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

_WEATHER = "What is the weather in Rome?"
_called: list[str] = []


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather in a city."""
    _called.append(city)
    return f"It is raining in {city}."


def _agent(model: Any, *, tool_choice: str | None = None, **more: Any) -> Agent:
    tools = [get_weather] if tool_choice else []
    settings = ModelSettings(temperature=0, max_tokens=100, tool_choice=tool_choice, include_usage=True)
    return Agent(name="A", instructions="Be short.", model=model, model_settings=settings, tools=tools, **more)


async def _check_text(model: Any) -> None:
    session = SQLiteSession("a conversation")
    result = await Runner.run(_agent(model), "What is the capital of France?", session=session)
    assert "Paris" in result.final_output and result.context_wrapper.usage.output_tokens > 3
    assert (await Runner.run(_agent(model), "And of Italy?", session=session)).final_output
    assert len(await session.get_items()) == 4


async def _check_tools(model: Any) -> None:
    for choice in ("required", "get_weather"):
        _called.clear()
        result = await Runner.run(_agent(model, tool_choice=choice), _WEATHER)
        kinds = [item.type for item in result.new_items]
        assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and kinds[-1] == "message_output_item", kinds
        assert _called and result.final_output


async def _check_streams(model: Any) -> None:
    _called.clear()
    result = Runner.run_streamed(_agent(model, tool_choice="get_weather"), _WEATHER)
    names, text = [], ""
    async for event in result.stream_events():
        if event.type == "raw_response_event":
            names.append(event.data.type)
            text += event.data.delta if event.data.type == "response.output_text.delta" else ""
    assert _called and text.strip() == result.final_output.strip() and result.context_wrapper.usage.output_tokens > 3
    assert names.count("response.completed") == 2 and "response.function_call_arguments.delta" in names


async def _check_structure(model: Any) -> None:
    result = await Runner.run(_agent(model, output_type=City), "Is Rome a capital?")
    assert isinstance(result.final_output, City)
    # The first answer is to be a call, and the last one a city: both are asked for at once.
    agent = _agent(model, tool_choice="required", output_type=City, tool_use_behavior="stop_on_first_tool")
    _called.clear()
    await Runner.run(agent, _WEATHER)
    assert _called


async def _check_going_on(model: Any) -> None:
    first = await Runner.run(_agent(model), "What is the capital of France?")
    again = await Runner.run(_agent(model), "And of Italy?", previous_response_id=first.last_response_id)
    assert again.context_wrapper.usage.input_tokens > first.context_wrapper.usage.total_tokens


async def main() -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=sys.argv[1], api_key="none", max_retries=0) as client:
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = kind(model="smollm2", openai_client=client)
            await _check_text(model)
            await _check_tools(model)
            await _check_streams(model)
            await _check_structure(model)
        await _check_going_on(model)


asyncio.run(main())
