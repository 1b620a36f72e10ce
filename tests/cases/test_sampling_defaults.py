"""Sampling defaults of generation_config.json, applied by every endpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from core.types.request import Sampling
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.text.completion import Models
from frontend.text.sampling_defaults import sampling_defaults
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.tiny_service import MakeCompletions

GENERATION = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05,
              "presence_penalty": 0.5, "frequency_penalty": -0.25}  # fmt: skip


class Endpoints:
    """HTTP and gRPC endpoints of one model with defaults."""

    def __init__(self, http: httpx.AsyncClient, stub: InferenceStub, fake: FakeTokenService) -> None:
        self.http, self.stub, self.fake = http, stub, fake

    async def asked(self, call: Callable[[], Awaitable[object]]) -> Sampling:
        self.fake.started.clear()
        await call()
        return self.fake.started[0].sampling

    async def post(self, path: str, **fields: Any) -> Any:
        answer = await self.http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest_asyncio.fixture
async def endpoints(completions: MakeCompletions, tmp_path: Path) -> AsyncIterator[Endpoints]:
    fake = FakeTokenService()
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION | {"max_new_tokens": 99}))
    defaults = sampling_defaults(tmp_path, "auto")
    models = Models(completions(fake, sampling_defaults=defaults))
    api = await open_grpc_api(models, access=Access.anybody(), host="127.0.0.1", port=0)
    app = create_app(models, access=Access.anybody(), is_healthy=lambda: True)
    async with (
        serve_http(app) as (host, port),
        http_client(base_url=f"http://{host}:{port}") as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel,
    ):
        yield Endpoints(client, InferenceStub(channel), fake)
    await api.close(grace_s=0)


async def test_every_endpoint_applies_the_defaults_and_requests_win(endpoints: Endpoints) -> None:
    """vllm-project/vllm#11164, NVIDIA/TensorRT-LLM#17213, Blaizzy/mlx-vlm#1331"""
    hi = [{"role": "user", "content": "hi"}]

    async def generate(**fields: Any) -> None:
        async for _ in endpoints.stub.Generate(pb.GenerateRequest(prompt="hi", sampling=pb.SamplingParams(**fields))):
            pass

    calls: dict[str, tuple[Callable[..., Awaitable[object]], int]] = {
        "chat": (lambda **more: endpoints.post("/v1/chat/completions", messages=hi, **more), 99),
        "text": (lambda **more: endpoints.post("/v1/completions", prompt="hi", **more), 16),
        "messages": (lambda **more: endpoints.post("/v1/messages", model="tiny", messages=hi, max_tokens=9, **more), 9),
        "responses": (lambda **more: endpoints.post("/v1/responses", input="hi", **more), 99),
        "grpc": (generate, 99),
    }
    for name, (call, max_tokens) in calls.items():
        found = await endpoints.asked(call)
        assert (found.temperature, found.top_k, found.top_p, found.min_p) == pytest.approx(
            (0.6, 20, 0.95, 0.05), rel=1e-6
        ), name
        assert (found.repetition_penalty, found.max_tokens) == (1.05, max_tokens), name
        assert (found.presence_penalty, found.frequency_penalty) == (0.5, -0.25), name
        found = await endpoints.asked(lambda call=call: call(temperature=0, top_p=0.5, top_k=0))
        assert (found.temperature, found.top_p, found.top_k, found.min_p) == pytest.approx((0, 0.5, 0, 0.05)), name
    answer = await endpoints.post("/v1/responses", input="hi", top_p=0.5)
    assert (answer["temperature"], answer["top_p"]) == (0.6, 0.5)


async def test_model_list_shows_the_defaults(endpoints: Endpoints) -> None:
    (model,) = (await endpoints.http.get("/v1/models")).json()["data"]
    assert model["default_sampling_params"] == {**GENERATION, "max_tokens": 99}


async def test_default_length_is_bounded_by_the_context(endpoints: Endpoints) -> None:
    found = await endpoints.asked(
        lambda: endpoints.post("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 180}])
    )
    assert 0 < found.max_tokens < 99
