"""Thinking budgets set by real clients on every endpoint of a real router."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from tests.e2e.conftest import Lab, exact_tree
from tests.support.router_service import http_url, router_service
from tests.support.sdk_clients import anthropic_client, openai_client

_TEMPLATE = "{{ messages[0]['content'] }}<think>{# </think> #}"
_NUM_MARKER = len("</think>")  # one token per character
_USER: Any = [{"role": "user", "content": "Why?"}]
_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
_SCHEMA["additionalProperties"] = False
_ASKED: dict[str, Any] = {"model": "letters", "messages": _USER, "seed": 5, "max_tokens": 24}


@pytest.mark.timeout(300)
async def test_thinking_budget_of_each_client_is_applied(letters_dir: Path, lab: Lab, tmp_path: Path) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text(_TEMPLATE)
    model = {"served_name": "letters", "chat_template": str(template)}
    async with (
        lab.shared(letters_dir, **exact_tree(1, 1)) as cluster,
        router_service(cluster, model=model) as service,
    ):
        url = http_url(service)
        async with openai_client(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
            thought = await _check_openai(client)
        async with anthropic_client(base_url=url, api_key="none", timeout=120) as client:
            await _check_anthropic(client, thought)
        await _check_grpc(service.grpc_port, thought)


async def _check_openai(client: AsyncOpenAI) -> str:
    """Check the thinking of an answer of 8 tokens."""
    free = await client.chat.completions.create(**_ASKED)
    assert free.usage.completion_tokens_details.reasoning_tokens == 24, "left to itself it never ends"
    everything = free.choices[0].message.model_extra["reasoning_content"]
    told = list[str]()
    for name, budget in (("thinking_token_budget", 8), ("thinking_budget", 0)):
        answer = await client.chat.completions.create(**_ASKED, extra_body={name: budget})
        (choice,) = answer.choices
        assert answer.usage.completion_tokens_details.reasoning_tokens == budget + _NUM_MARKER
        thought = choice.message.model_extra.get("reasoning_content") or ""
        assert bool(thought) == bool(budget) and everything.startswith(thought) and choice.message.content
        stream = await client.chat.completions.create(**_ASKED, extra_body={name: budget}, stream=True)
        chunks = [chunk.choices[0].delta async for chunk in stream]
        assert "".join((chunk.model_extra or {}).get("reasoning_content") or "" for chunk in chunks) == thought
        assert "".join(chunk.content or "" for chunk in chunks) == choice.message.content
        told.append(thought)
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": _SCHEMA}}
    bound = await client.chat.completions.create(
        **_ASKED | {"n": 2, "max_tokens": 40},
        response_format=form,
        extra_body={"thinking_token_budget": 9},
    )
    for one in bound.choices:
        assert json.loads(one.message.content)["city"] in ("Paris", "Rome") and one.finish_reason == "stop"
        assert one.message.model_extra["reasoning_content"]
    assert bound.usage.completion_tokens_details.reasoning_tokens <= 2 * (9 + _NUM_MARKER)
    text = await client.completions.create(
        model="letters", prompt="Hm. <think>", seed=5, extra_body={"thinking_token_budget": 3}
    )
    assert "</think>" in text.choices[0].text, "where the text is all there is, it has the marker"
    answer = await client.responses.create(
        model="letters", input="hi", max_output_tokens=40, extra_body={"thinking_token_budget": 5}
    )
    assert answer.usage.output_tokens_details.reasoning_tokens == 5 + _NUM_MARKER
    with pytest.raises(openai.BadRequestError) as rejected:
        await client.chat.completions.create(**_ASKED, extra_body={"thinking_token_budget": -3})
    assert rejected.value.param == "thinking_token_budget"
    return told[0]


async def _check_anthropic(client: AsyncAnthropic, thought: str) -> None:
    fields: Any = {"model": "letters", "max_tokens": 24, "messages": _USER, "extra_body": {"seed": 5}}
    thinking: Any = {"type": "enabled", "budget_tokens": 8}
    whole = await client.messages.create(**fields, thinking=thinking)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking == thought
    assert whole.usage.output_tokens_details.thinking_tokens == 8 + _NUM_MARKER
    async with client.messages.stream(**fields, thinking=thinking) as stream:
        streamed = await stream.get_final_message()
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert streamed.content[0].thinking == thought and streamed.content[1].text == whole.content[1].text


async def _check_grpc(port: int, thought: str) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        asked = pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=_USER[0]["content"])]),
            sampling=pb.SamplingParams(seed=5, max_tokens=24, thinking_token_budget=8, best_of=2, n=1),
        )
        events = [event async for event in rpc.InferenceStub(channel).Generate(asked)]
        assert "".join(event.delta.reasoning for event in events) == thought
        assert {event.delta.choice for event in events} == {0}
        assert events[-1].summary.usage.reasoning_tokens == 2 * (8 + _NUM_MARKER), "of all that were computed"
