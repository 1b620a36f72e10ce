"""Several models at one endpoint: requests reach the named model, and failures stay with theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import httpx
import openai
import pytest
import pytest_asyncio

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from core.types.errors import ModelUnavailable, RequestError, UnknownModel
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.text.completion import Completions
from frontend.text.models import Models
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.sdk_clients import openai_client
from tests.support.tiny_service import MakeCompletions

pytestmark = pytest.mark.asyncio(loop_scope="module")

_SAYS = {"first": "one", "second": "two"}
_HI = [{"role": "user", "content": "hi"}]


@dataclass
class Endpoints:
    models: Models
    served: dict[str, Completions]
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    grpc: InferenceStub

    async def rejected(self, model: str) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as caught:
            await self.client.chat.completions.create(model=model, messages=_HI)  # type: ignore[arg-type]
        return caught.value

    async def rejected_by_grpc(self, model: str) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in self.grpc.Generate(pb.GenerateRequest(model=model, prompt="hi")):
                pass
        return caught.value


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def endpoints(completions: MakeCompletions, byte_level: Tokenizer) -> AsyncIterator[Endpoints]:
    def made(name: str) -> Completions:
        ids = byte_level.encode(f"{_SAYS[name]}<|im_end|>")
        fake = FakeTokenService(script=lambda *_: ids)
        return completions(fake, name=name, max_context=256 if name == "first" else 512)

    served = {name: made(name) for name in _SAYS}
    models = Models(served["first"])
    models.add(served["second"])
    app = create_app(models, access=Access.anybody(), is_healthy=lambda: True)
    endpoint = await open_grpc_api(models, access=Access.anybody(), host="127.0.0.1", port=0)
    async with serve_http(app) as (host, port):
        url = f"http://{host}:{port}"
        async with (
            openai_client(base_url=f"{url}/v1", api_key="none") as client,
            http_client(base_url=url) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel,
        ):
            yield Endpoints(models, served, client, http, InferenceStub(channel))
    await endpoint.close(grace_s=0)


@pytest.mark.parametrize("model", ["first", "second"])
async def test_every_api_serves_the_named_model(endpoints: Endpoints, model: str) -> None:
    says = _SAYS[model]
    chat = await endpoints.client.chat.completions.create(model=model, messages=_HI)  # type: ignore[call-overload]
    assert (chat.model, chat.choices[0].message.content) == (model, says)
    text = await endpoints.client.completions.create(model=model, prompt="hi")
    assert (text.model, text.choices[0].text) == (model, says)
    response = await endpoints.client.responses.create(model=model, input="hi")
    assert (response.model, response.output_text) == (model, says)
    body = {"model": model, "max_tokens": 9, "messages": _HI}
    message = (await endpoints.http.post("/v1/messages", json=body)).json()
    assert (message["model"], message["content"][0]["text"]) == (model, says)
    events = [event async for event in endpoints.grpc.Generate(pb.GenerateRequest(model=model, prompt="hi"))]
    assert "".join(event.delta.text for event in events) == says


async def test_other_endpoints_use_the_named_model(endpoints: Endpoints) -> None:
    for model, most in (("first", 256), ("second", 512)):
        asked = {"model": model, "prompt": "hi"}
        assert (await endpoints.http.post("/tokenize", json=asked)).json()["max_model_len"] == most
        assert (await endpoints.grpc.Tokenize(pb.TokenizeRequest(model=model, prompt="hi"))).max_context == most
        rendered = (await endpoints.http.post("/v1/completions/render", json=asked)).json()
        assert rendered[0]["model"] == model
    long = [1] * 300
    assert len(
        (await endpoints.http.post("/v1/completions", json={"model": "second", "prompt": long})).json()["choices"]
    )
    rejected = await endpoints.http.post("/v1/completions", json={"model": "first", "prompt": long})
    assert rejected.json()["error"]["code"] == "context_length_exceeded"


async def test_all_models_are_listed_and_the_default_is_the_routers_own(endpoints: Endpoints) -> None:
    assert [model.id async for model in endpoints.client.models.list()] == ["first", "second"]
    assert (await endpoints.client.models.retrieve("second")).id == "second"
    listed = await endpoints.grpc.ListModels(pb.ListModelsRequest())
    assert [(model.id, model.max_context) for model in listed.models] == [("first", 256), ("second", 512)]
    answer = await endpoints.http.post("/v1/completions", json={"prompt": "hi"})
    assert answer.json()["model"] == "first"


async def test_unknown_model_error_lists_the_models(endpoints: Endpoints) -> None:
    said = "model 'third' is not served here; 'first' and 'second' are"
    rejected = await endpoints.rejected("third")
    assert (rejected.status_code, rejected.code, rejected.param) == (404, "model_not_found", "model")
    assert rejected.body["message"] == said  # type: ignore[index]
    with pytest.raises(openai.NotFoundError, match=said):
        await endpoints.client.models.retrieve("third")
    by_grpc = await endpoints.rejected_by_grpc("third")
    assert (by_grpc.code(), by_grpc.details()) == (grpc.StatusCode.NOT_FOUND, said)


async def test_unavailable_model_is_503_and_others_are_served(endpoints: Endpoints) -> None:
    endpoints.served["second"].token_service = FakeTokenService(reject=ModelUnavailable("model 'second' has gone"))
    rejected = await endpoints.rejected("second")
    assert (rejected.status_code, rejected.code, rejected.response.headers["retry-after"]) == (
        503, "model_unavailable", "1",
    )  # fmt: skip
    assert (await endpoints.rejected_by_grpc("second")).code() is grpc.StatusCode.UNAVAILABLE
    answer = await endpoints.client.completions.create(model="first", prompt="hi")
    assert answer.choices[0].text == "one"


async def test_models_can_be_added_and_removed_and_the_first_of_a_name_wins(completions: MakeCompletions) -> None:
    first, second, twin = (completions(FakeTokenService(), name=name) for name in ("a", "b", "b"))
    models = Models(first)
    models.report_unavailable(["b"], "the model is loading")
    with pytest.raises(ModelUnavailable, match="'b' is unavailable at this router: the model is loading"):
        models.find("b")
    assert models.names == ["a"], "unavailable models are not listed"
    assert models.add(second) and not models.add(twin) and not models.add(completions(FakeTokenService(), name="a"))
    models.report_unavailable(["b"], "of its twin")
    models.remove(twin)
    assert models.find("b") is second and models.find("") is models.find("a") is first
    models.remove(second)
    with pytest.raises(UnknownModel, match="model 'b' is not served here; 'a' is"):
        models.find("b")
    with pytest.raises(RequestError):
        models.card("")
