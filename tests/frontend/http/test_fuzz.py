"""Fuzzed requests to both endpoints: no crash, every error names its field, and later requests succeed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from frontend.access.access import Access
from frontend.anthropic.types import MessagesBody
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.openai.types import ChatBody, TextBody
from frontend.responses.types import ResponsesBody
from tests.frontend.http.both_doors import BothDoors
from tests.frontend.http.fuzzed_requests import anthropic_bodies, grpc_requests, json_bodies, responses_bodies
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.tiny_service import MakeCompletions

# 40 by default, thousands with the slow profile.
_SOME = settings(
    max_examples=settings().max_examples ** 2 // 40, database=None, suppress_health_check=list(HealthCheck)
)
_TEXT = json_bodies(TextBody.model_fields, input_field="prompt")
_CHAT = json_bodies(ChatBody.model_fields, input_field="messages")
_TURNS = anthropic_bodies(MessagesBody.model_fields)
_ITEMS = responses_bodies(ResponsesBody.model_fields)


@asynccontextmanager
async def _open(completions: MakeCompletions) -> AsyncIterator[tuple[httpx.AsyncClient, InferenceStub]]:
    service = completions(FakeTokenService(max_context=32), max_context=32, max_choices=64)
    endpoint = await open_grpc_api(service, access=Access.anybody(), host="127.0.0.1", port=0)
    app = create_app(service, access=Access.anybody(), is_healthy=lambda: True)
    async with serve_http(app) as (host, port), http_client(base_url=f"http://{host}:{port}") as http:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel:
            yield http, InferenceStub(channel)
    await endpoint.close(grace_s=0)
    service.close()


@pytest.fixture(scope="module")
def endpoints(completions: MakeCompletions) -> Iterator[BothDoors]:
    with asyncio.Runner() as runner:
        opened = _open(completions)
        http, stub = runner.run(opened.__aenter__())
        yield BothDoors(runner, http, stub)
        runner.run(opened.__aexit__(None, None, None))


# Regressions: these once crashed replicas.
_KILLER = {"prompt": '"Hello there"', "repetition_penalty": "1e-40", "logprobs": "1", "max_tokens": "2"}
_GRPC_KILLER = pb.GenerateRequest(
    prompt="Hello there", sampling=pb.SamplingParams(repetition_penalty=1e-40, logprobs=1, max_tokens=2)
)


@_SOME
@given(_TEXT)
@example(_KILLER)
def test_text_bodies(endpoints: BothDoors, body: dict[str, str]) -> None:
    endpoints.post("/v1/completions", body)


@_SOME
@given(_CHAT)
def test_chat_bodies(endpoints: BothDoors, body: dict[str, str]) -> None:
    endpoints.post("/v1/chat/completions", body)


@_SOME
@given(_TURNS)
@example(
    {
        "max_tokens": "1",
        "messages": '[{"role":"assistant","content":[{"type":"tool_use","name":"a","input":{"a":"\\ud800"}}]}]',
    }
)
def test_anthropic_bodies(endpoints: BothDoors, body: dict[str, str]) -> None:
    endpoints.post("/v1/messages", body)


@_SOME
@given(_ITEMS)
def test_responses_bodies(endpoints: BothDoors, body: dict[str, str]) -> None:
    endpoints.post("/v1/responses", body)


@_SOME
@given(grpc_requests())
@example(_GRPC_KILLER)
def test_grpc_messages(endpoints: BothDoors, request_: pb.GenerateRequest) -> None:
    endpoints.generate(request_)
