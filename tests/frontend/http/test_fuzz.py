"""Fuzzed requests to both endpoints: no crash, every error names its field, and later requests succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.rpc import inference_pb2 as pb
from frontend.anthropic.types import MessagesBody
from frontend.openai.types import ChatBody, TextBody
from frontend.responses.types import ResponsesBody
from tests.frontend.http.both_endpoints import BothDoors
from tests.frontend.http.fuzzed_requests import anthropic_bodies, grpc_requests, json_bodies, responses_bodies
from tests.support.serving import serving
from tests.support.tiny_service import MakeCompletions

# 40 by default, thousands with the slow profile.
_SOME = settings(
    max_examples=settings().max_examples ** 2 // 40, database=None, suppress_health_check=list(HealthCheck)
)
_BODIES = {
    "/v1/completions": json_bodies(TextBody.model_fields, input_field="prompt"),
    "/v1/chat/completions": json_bodies(ChatBody.model_fields, input_field="messages"),
    "/v1/messages": anthropic_bodies(MessagesBody.model_fields),
    "/v1/responses": responses_bodies(ResponsesBody.model_fields),
}


@pytest.fixture(scope="module")
def endpoints(completions: MakeCompletions) -> Iterator[BothDoors]:
    with asyncio.Runner() as runner:
        opened = serving(completions(max_context=32, max_choices=64))
        served = runner.run(opened.__aenter__())
        yield BothDoors(runner, served.http, served.stub)
        runner.run(opened.__aexit__(None, None, None))


# Regressions: these once crashed replicas.
_KILLERS = [
    ("/v1/completions", {"prompt": '"Hello"', "repetition_penalty": "1e-40", "logprobs": "1", "max_tokens": "2"}),
    ("/v1/messages", {"max_tokens": "1", "messages": '[{"role":"assistant","content":[{"type":"tool_use","name":"a",'
                                                     '"input":{"a":"\\ud800"}}]}]'}),
]  # fmt: skip
_GRPC_KILLER = pb.GenerateRequest(
    prompt="Hello there", sampling=pb.SamplingParams(repetition_penalty=1e-40, logprobs=1, max_tokens=2)
)


@pytest.mark.parametrize(("path", "bodies"), _BODIES.items(), ids=_BODIES)
@_SOME
@given(data=st.data())
def test_bodies(
    endpoints: BothDoors, path: str, bodies: st.SearchStrategy[dict[str, str]], data: st.DataObject
) -> None:
    endpoints.post(path, data.draw(bodies))


@pytest.mark.parametrize(("path", "body"), _KILLERS)
def test_bodies_that_crashed_replicas(endpoints: BothDoors, path: str, body: dict[str, str]) -> None:
    endpoints.post(path, body)


@_SOME
@given(grpc_requests())
@example(_GRPC_KILLER)
def test_grpc_messages(endpoints: BothDoors, request_: pb.GenerateRequest) -> None:
    endpoints.generate(request_)
