"""Sampling defaults of generation_config.json: read as vLLM does, and applied by every endpoint."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from core.spec.schema import ModelSpec
from core.types.errors import SpecError
from core.types.request import Sampling
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.text.completion_request import NEUTRAL
from frontend.text.models import Models
from frontend.text.sampling_defaults import sampling_defaults
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions

GENERATION = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05,
              "presence_penalty": 0.5, "frequency_penalty": -0.25}  # fmt: skip


def write(directory: Path, **generation: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (GENERATION, GENERATION),
        ({"top_k": 1, "temperature": None, "eos_token_id": 2}, {"top_k": 1}),
        ({"max_new_tokens": 99}, {"max_tokens": 99}),
        ({"top_k": 50.0, "temperature": 0}, {"top_k": 50, "temperature": 0}),
        ({"do_sample": False}, {"temperature": 0}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0, "top_p": 0.8}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({}, {}),
    ],
    ids=str,
)
def test_defaults_of_the_file(generation: dict[str, Any], expected: dict[str, float], tmp_path: Path) -> None:
    assert sampling_defaults(write(tmp_path, **generation), "auto") == {**NEUTRAL, **expected}


def test_choice_of_the_spec(tmp_path: Path) -> None:
    (own := tmp_path / "own").mkdir()
    (other := tmp_path / "other").mkdir()
    assert sampling_defaults(own, "auto") == NEUTRAL, "a model without the file"
    write(own, top_k=1)
    write(other, top_k=2)
    assert sampling_defaults(own, "vllm") == NEUTRAL
    assert sampling_defaults(own, ModelSpec(generation_config=str(other)).generation_config)["top_k"] == 2
    with pytest.raises(SpecError, match=r"nowhere/generation_config\.json: no such file"):
        sampling_defaults(own, str(tmp_path / "nowhere"))
    assert Path(ModelSpec(generation_config="there").generation_config).is_absolute()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": -1}, {"top_p": 0}, {"top_k": 1.5}, {"top_k": math.inf}, {"min_p": "x"}, {"top_p": True}),
        {"do_sample": "false"},
    ],
    ids=str,
)
def test_invalid_defaults_name_the_fix(wrong: dict[str, Any], tmp_path: Path) -> None:
    ((name, value),) = wrong.items()
    complaint = rf"generation_config.json: {name} is {value!r}, .* or set model.generation_config: vllm"
    with pytest.raises(SpecError, match=complaint):
        sampling_defaults(write(tmp_path, **wrong), "auto")


def test_fields_without_effect_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampling_defaults(write(tmp_path, no_repeat_ngram_size=3, num_beams=1, suppress_tokens=[7]), "auto")
    assert "not applied: no_repeat_ngram_size, suppress_tokens" in caplog.text


def test_end_tokens_are_those_of_the_chosen_directory(byte_level_dir: Path, tmp_path: Path) -> None:
    own = Tokenizer(byte_level_dir).eos_token_ids
    write(tmp_path, eos_token_id=[5])
    assert Tokenizer(byte_level_dir, generation_dir=tmp_path).eos_token_ids - own == {5}


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
    defaults = sampling_defaults(write(tmp_path, **GENERATION, max_new_tokens=99), "auto")
    models = Models(completions(fake, sampling_defaults=defaults))
    api = await open_grpc_api(models, access=Access.anybody(), host="127.0.0.1", port=0)
    app = create_app(models, access=Access.anybody(), is_healthy=lambda: True)
    async with (
        serve_http(app) as (host, port),
        httpx.AsyncClient(base_url=f"http://{host}:{port}") as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel,
    ):
        yield Endpoints(client, InferenceStub(channel), fake)
    await api.close(grace_s=0)


async def test_every_endpoint_applies_the_defaults_and_requests_win(endpoints: Endpoints) -> None:
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
