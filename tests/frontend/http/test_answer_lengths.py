"""max_tokens beyond the context, and the context that replicas can really hold, at every API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from core.spec.schema import RouterSpec
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from tests.frontend.access.keys import access_with, issue
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.sdk_clients import anthropic_client, openai_client
from tests.support.tiny_service import MakeCompletions

_HI: Any = [{"role": "user", "content": "hi"}]
_CONTEXT = 64
_BOUNDS: dict[str, dict[str, Any]] = {  # max_tokens is an upper bound
    "/v1/messages": {"messages": _HI, "max_tokens": 32_000},
    "/v1/responses": {"input": "hi", "max_output_tokens": 32_000},
}
_EXACT: dict[str, dict[str, Any]] = {  # max_tokens must fit, unless the deployment clamps it
    "/v1/chat/completions": {"messages": _HI, "max_tokens": 32_000},
    "/v1/chat/completions newer": {"messages": _HI, "max_completion_tokens": 32_000, "n": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 32_000},
}


@asynccontextmanager
async def _served(
    completions: MakeCompletions, *, access: Access | None = None, spec: RouterSpec | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeTokenService]]:
    fake = FakeTokenService(script=lambda *_: [40], max_context=_CONTEXT)
    service = completions(fake, **{"max_context": _CONTEXT} | options)
    app = create_app(service, access=access or Access.anybody(), is_healthy=lambda: True, spec=spec or RouterSpec())
    async with serve_http(app) as address, http_client(base_url="http://{}:{}".format(*address)) as http:
        yield http, fake
    service.close()


def _reason(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["finish_reason"])
    return str(answer.get("stop_reason") or answer["incomplete_details"]["reason"])


@pytest.mark.parametrize("path", _BOUNDS)
async def test_upper_bounds_are_clamped_to_the_context(completions: MakeCompletions, path: str) -> None:
    async with _served(completions) as (http, fake):
        answer = await http.post(path, json=_BOUNDS[path])
        assert answer.status_code == 200, answer.text
        assert _reason(answer.json()) == {"/v1/messages": "max_tokens"}.get(path, "max_output_tokens")
        (started,) = fake.started
        assert started.sampling.max_tokens == _CONTEXT - started.num_prompt_tokens
        long = {**_BOUNDS[path], "messages" if "messages" in _BOUNDS[path] else "input": "x" * 500}
        if "messages" in long:
            long["messages"] = [{"role": "user", "content": long["messages"]}]
        refused = await http.post(path, json=long)
        assert refused.status_code == 400 and f"holds {_CONTEXT} tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", _EXACT)
@pytest.mark.parametrize("treatment", ["refuse", "clamp"])
async def test_other_apis_refuse_or_clamp_as_the_spec_says(
    completions: MakeCompletions, path: str, treatment: Any
) -> None:
    async with _served(completions, spec=RouterSpec(max_tokens_beyond_context=treatment)) as (http, fake):
        answer = await http.post(path.split()[0], json=_EXACT[path])
        if treatment == "refuse":
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            return
        assert (answer.status_code, _reason(answer.json())) == (200, "length")
        assert fake.started[0].sampling.max_tokens == _CONTEXT - fake.started[0].num_prompt_tokens


async def test_truncated_prompt_leaves_half_of_the_context(completions: MakeCompletions) -> None:
    async with _served(completions) as (http, fake):
        for text, num_prompt in (("hi", None), ("x" * 60, _CONTEXT // 2)):
            body = {"input": text, "max_output_tokens": 32_000, "truncation": "auto"}
            assert (await http.post("/v1/responses", json=body)).status_code == 200
            started = fake.started[-1]
            assert num_prompt in (None, started.num_prompt_tokens)
            assert started.sampling.max_tokens == _CONTEXT - started.num_prompt_tokens


async def test_limits_of_a_key_bound_the_answer_too(completions: MakeCompletions) -> None:
    short, slow = issue("short", max_tokens=5), issue("slow", tpm=50)
    async with _served(completions, access=access_with(short, slow)) as (http, fake):
        for path, body in _BOUNDS.items():
            for key in (short, slow):
                answer = await http.post(path, json=body, headers={"authorization": key.header})
                assert answer.status_code == (200 if key is short or path == "/v1/messages" else 429), answer.text
        assert [one.sampling.max_tokens for one in fake.started if one.sampling.max_tokens <= 5] == [5, 5]
        refused = await http.post(
            "/v1/completions", json=_EXACT["/v1/completions"], headers={"authorization": short.header}
        )
        assert refused.status_code == 400 and "allows at most 5" in refused.text


async def test_every_api_names_what_a_replica_holds(completions: MakeCompletions) -> None:
    """The pool is smaller than the context at first, then larger."""
    held: list[int | None] = [40]
    async with _served(completions, max_held=lambda: held[0]) as (http, _):
        for limit in (40, _CONTEXT):
            assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == limit
            assert (await http.get("/v1/models/tiny")).json()["max_model_len"] == limit
            assert (await http.post("/tokenize", json={"prompt": "hi"})).json()["max_model_len"] == limit
            for path, body in _EXACT.items():
                refused = await http.post(path.split()[0], json=body)
                assert f"holds {limit} tokens" in refused.json()["error"]["message"]
            answer = await http.post("/v1/completions", json={"prompt": list(range(30)), "max_tokens": limit - 30})
            assert answer.status_code == 200 and answer.json()["usage"]["total_tokens"] == limit
            held[0] = 1000


async def test_grpc_names_what_a_replica_holds(completions: MakeCompletions) -> None:
    service = completions(FakeTokenService(), max_context=_CONTEXT, max_held=lambda: 40)
    endpoint = await open_grpc_api(service, access=Access.anybody(), host="127.0.0.1", port=0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel:
        stub = InferenceStub(channel)
        assert (await stub.ListModels(pb.ListModelsRequest())).models[0].max_context == 40
        assert (await stub.Tokenize(pb.TokenizeRequest(prompt="hi"))).max_context == 40
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(50)))
        with pytest.raises(grpc.aio.AioRpcError, match="holds 40 tokens"):
            async for _ in stub.Generate(asked):
                pass
    await endpoint.close(grace_s=0)
    service.close()


async def test_official_clients_get_clamped_answers(completions: MakeCompletions) -> None:
    async with _served(completions) as (http, _):
        async with anthropic_client(base_url=str(http.base_url), api_key="none") as agent:
            async with agent.messages.stream(model="tiny", messages=_HI, max_tokens=32_000) as stream:
                assert (await stream.get_final_message()).stop_reason == "max_tokens"
        async with openai_client(base_url=f"{http.base_url}/v1", api_key="none") as client:
            response = await client.responses.create(model="tiny", input="hi", max_output_tokens=32_000)
            assert response.status == "incomplete"
