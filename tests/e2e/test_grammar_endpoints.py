"""Structured output for real clients on both endpoints of a real router, with SmolLM2."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI
from pydantic import BaseModel

from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from tests.e2e.conftest import Lab
from tests.support.router_service import http_url, router_service
from tests.support.sdk_clients import openai_client

_ASKED: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Describe a city as JSON."}],
    "temperature": 0,
    "max_tokens": 60,
}
_CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_HOSTILE = {
    "endless": {"$ref": "#"},
    "elsewhere": {"$ref": "http://127.0.0.1:1/schema.json"},
    "unknown": {"type": "array", "uniqueItems": True},
    "wide": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1900)}},
    "blown up": {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(4)]} for i in range(9)]},
    "no type": {"type": "strange"},
}


_EACH = 'e["x"]'
_TAGS: Any = {
    "type": "structural_tag",
    "structures": [{"begin": "e[", "schema": {"enum": ["x"]}, "end": "]"}],
    "triggers": ["e"],
}
_ONCE = {"at_least_one": True, "stop_after_first": True}


class City(BaseModel):
    name: str
    is_large: bool


@pytest.mark.timeout(180)
async def test_answers_follow_the_requested_format_on_both_endpoints(smollm2_dir: Path, lab: Lab) -> None:
    async with lab.shared(smollm2_dir, model={"served_name": "smollm2"}) as cluster, router_service(cluster) as service:
        async with openai_client(base_url=f"{http_url(service)}/v1", api_key="none") as client:
            await _check_formats(client)
            await _check_structured(client)
            await _check_structural_tags(client)
            await _check_refusals(client)
        await _check_grpc(service.grpc_port)


async def _check_formats(client: AsyncOpenAI) -> None:
    parsed = await client.chat.completions.parse(**_ASKED, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)
    for strict in (True, False):
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY, "strict": strict}}
        answer = await client.chat.completions.create(**_ASKED | {"n": 2, "temperature": 1}, response_format=form)
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            Draft202012Validator(_CITY).validate(json.loads(choice.message.content))
    cut = await client.chat.completions.create(**_ASKED, response_format=form, stop='ame"')  # ends within forced tokens
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ('{"n', "stop")
    assert cut.usage.completion_tokens == 3  # without the forced tokens after the stop string
    stream = await client.chat.completions.create(
        **_ASKED | {"max_tokens": 200}, response_format={"type": "json_object"}, stream=True
    )
    chunks = [chunk.choices[0] async for chunk in stream]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert text.startswith("{")
    assert chunks[-1].finish_reason == "length" or isinstance(json.loads(text), dict)


async def _check_structured(client: AsyncOpenAI) -> None:
    for requests, expected in (
        ({"choice": ["Paris", "Rome"]}, ("Paris", "Rome")),
        ({"regex": r"(yes|no), sir"}, ("yes, sir", "no, sir")),
        ({"grammar": 'start: "a" | "b"'}, ("a", "b")),
        ({"grammar": 'root ::= "x" | "y"'}, ("x", "y")),
        ({"json": {"type": "boolean"}}, ("true", "false")),
    ):
        body = {"structured_outputs": requests}
        chat = await client.chat.completions.create(**_ASKED, extra_body=body)
        assert chat.choices[0].message.content in expected
        text = await client.completions.create(model="smollm2", prompt="The answer is", extra_body=body)
        assert text.choices[0].text in expected


async def _check_structural_tags(client: AsyncOpenAI) -> None:
    """Check tags in free text that start at each "e", and each form of a single tag."""
    results = await client.chat.completions.create(**_ASKED | {"max_tokens": 30}, response_format=_TAGS)
    text = results.choices[0].message.content
    assert _keeps_to_tags(text) and _EACH in text, text
    stream = await client.completions.create(
        model="smollm2",
        prompt="The",
        max_tokens=24,
        extra_body={"structured_outputs": {"structural_tag": json.dumps(_TAGS)}},
        stream=True,
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert _keeps_to_tags(text), text
    city = {
        "type": "tag",
        "begin": "<city>",
        "content": {"type": "json_schema", "json_schema": _CITY},
        "end": "</city>",
    }
    for form in (city, {"type": "triggered_tags", "triggers": ["<"], "tags": [city], **_ONCE}):
        requests: Any = {"type": "structural_tag", "format": form}
        (choice,) = (await client.chat.completions.create(**_ASKED, response_format=requests)).choices
        begin, content, end = re.split("(?<=<city>)|(?=</city>)", choice.message.content)
        assert (begin, end, choice.finish_reason) == ("<city>", "</city>", "stop")
        Draft202012Validator(_CITY).validate(json.loads(content))
    with pytest.raises(openai.BadRequestError, match="'qwen_xml_parameter' is not supported") as rejected:
        requests["format"] = {**city, "content": {"type": "qwen_xml_parameter"}}
        await client.chat.completions.create(**_ASKED, response_format=requests)
    assert rejected.value.param == "response_format"


def _keeps_to_tags(text: str) -> bool:
    """Assert that the tags are complete, except that the last may be cut."""
    *whole, last = re.split("(?=e)", text)
    return all("e" not in part or part.startswith(_EACH) for part in whole) and (
        "e" not in last or last.startswith(_EACH) or _EACH.startswith(last)
    )


async def _check_refusals(client: AsyncOpenAI) -> None:
    """Assert that hostile schemas are rejected by name or answered, while other requests are served."""
    requests = [_ask_for(client, schema) for schema in _HOSTILE.values()]
    others = [client.chat.completions.create(**_ASKED | {"max_tokens": 4}) for _ in range(2)]
    *refusals, _, _ = await asyncio.gather(*requests, *others)
    results = dict(zip(_HOSTILE, refusals, strict=True))
    assert {name for name, param in results.items() if param == "response_format.json_schema.schema"} >= set(
        _HOSTILE
    ) - {"wide"}
    for field, value in (("regex", "[a"), ("grammar", "start: nothing"), ("regex", "a" * 9000)):
        with pytest.raises(openai.BadRequestError) as rejected:
            await client.chat.completions.create(**_ASKED, extra_body={"structured_outputs": {field: value}})
        assert rejected.value.param == f"structured_outputs.{field}"
    for field in ("min_tokens", "ignore_eos"):
        body = {"structured_outputs": {"choice": ["a"]}, field: 1 if field == "min_tokens" else True}
        with pytest.raises(openai.BadRequestError) as rejected:
            await client.chat.completions.create(**_ASKED, extra_body=body)
        assert rejected.value.param == field


async def _ask_for(client: AsyncOpenAI, schema: dict[str, Any]) -> str | None:
    """Return the field that is named in a rejection."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    try:
        await client.chat.completions.create(**_ASKED | {"max_tokens": 4}, response_format=form)
    except openai.BadRequestError as error:
        return error.param
    return None


async def _check_grpc(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = rpc.InferenceStub(channel)
        sampling = pb.SamplingParams(temperature=0, max_tokens=60)
        for grammar in (
            pb.Grammar(json_schema=json.dumps(_CITY)),
            pb.Grammar(choice=pb.Choices(texts=['{"name": "a", "size": "large"}'])),
        ):
            requests = pb.GenerateRequest(prompt="A city: ", sampling=sampling, grammar=grammar)
            text = "".join([event.delta.text async for event in stub.Generate(requests)])
            Draft202012Validator(_CITY).validate(json.loads(text))
        tags = pb.GenerateRequest(prompt="The", sampling=sampling, grammar=pb.Grammar(structural_tag=json.dumps(_TAGS)))
        text = "".join([event.delta.text async for event in stub.Generate(tags)])
        assert _keeps_to_tags(text), text
        for wrong, says in (
            (pb.Grammar(regex="["), "grammar.regex"),
            (pb.Grammar(structural_tag="{}"), "grammar.structural_tag: must have either format, or"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as rejected:
                async for _ in stub.Generate(pb.GenerateRequest(prompt="x", grammar=wrong)):
                    pass
            assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert says in rejected.value.details()
