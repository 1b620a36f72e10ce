"""Several models at one endpoint: requests reach the named model, and failures stay with theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import openai
import pytest
import pytest_asyncio

from core.rpc import inference_pb2 as pb
from core.types.errors import ModelUnavailable, RequestError, UnknownModel
from frontend.text.completion import Completions, Models
from frontend.text.tokenizer import Tokenizer
from tests.support.fake_token_service import FakeTokenService
from tests.support.serving import USER, Refusal, Served, serving
from tests.support.tiny_service import MakeCompletions

pytestmark = pytest.mark.asyncio(loop_scope="module")

_SAYS = {"first": "one", "second": "two"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def second(completions: MakeCompletions, byte_level: Tokenizer) -> Completions:
    return completions(name="second", max_context=512, token_service=_saying(byte_level, "two"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def endpoints(completions: MakeCompletions, byte_level: Tokenizer, second: Completions) -> AsyncIterator[Served]:
    models = Models(completions(name="first", token_service=_saying(byte_level, "one")))
    models.add(second)
    async with serving(models) as served:
        yield served


def _saying(tokenizer: Tokenizer, text: str) -> FakeTokenService:
    ids = tokenizer.encode(f"{text}<|im_end|>")
    return FakeTokenService(script=lambda *_: ids)


async def _rejected(endpoints: Served, model: str) -> tuple[openai.APIStatusError, Refusal]:
    """Return the error of each endpoint."""
    with pytest.raises(openai.APIStatusError) as caught:
        await endpoints.client.chat.completions.create(model=model, messages=USER)
    return caught.value, await endpoints.rejected(pb.GenerateRequest(model=model, prompt="hi"))


@pytest.mark.parametrize("model", ["first", "second"])
async def test_every_api_serves_the_named_model(endpoints: Served, model: str) -> None:
    says = _SAYS[model]
    chat = await endpoints.client.chat.completions.create(model=model, messages=USER)
    assert (chat.model, chat.choices[0].message.content) == (model, says)
    text = await endpoints.client.completions.create(model=model, prompt="hi")
    assert (text.model, text.choices[0].text) == (model, says)
    response = await endpoints.client.responses.create(model=model, input="hi")
    assert (response.model, response.output_text) == (model, says)
    body = {"model": model, "max_tokens": 9, "messages": USER}
    message = (await endpoints.http.post("/v1/messages", json=body)).json()
    assert (message["model"], message["content"][0]["text"]) == (model, says)
    events = await endpoints.generate(pb.GenerateRequest(model=model, prompt="hi"))
    assert "".join(event.delta.text for event in events) == says


async def test_other_endpoints_use_the_named_model(endpoints: Served) -> None:
    for model, most in (("first", 256), ("second", 512)):
        asked = {"model": model, "prompt": "hi"}
        assert (await endpoints.http.post("/tokenize", json=asked)).json()["max_model_len"] == most
        assert (await endpoints.stub.Tokenize(pb.TokenizeRequest(model=model, prompt="hi"))).max_context == most
        rendered = (await endpoints.http.post("/v1/completions/render", json=asked)).json()
        assert rendered[0]["model"] == model
    long = [1] * 300
    assert len(
        (await endpoints.http.post("/v1/completions", json={"model": "second", "prompt": long})).json()["choices"]
    )
    rejected = await endpoints.http.post("/v1/completions", json={"model": "first", "prompt": long})
    assert rejected.json()["error"]["code"] == "context_length_exceeded"


async def test_all_models_are_listed_and_the_default_is_the_routers_own(endpoints: Served) -> None:
    assert [model.id async for model in endpoints.client.models.list()] == ["first", "second"]
    assert (await endpoints.client.models.retrieve("second")).id == "second"
    listed = await endpoints.stub.ListModels(pb.ListModelsRequest())
    assert [(model.id, model.max_context) for model in listed.models] == [("first", 256), ("second", 512)]
    answer = await endpoints.http.post("/v1/completions", json={"prompt": "hi"})
    assert answer.json()["model"] == "first"


async def test_unknown_model_error_lists_the_models(endpoints: Served) -> None:
    said = "model 'third' is not served here; 'first' and 'second' are"
    rejected, by_grpc = await _rejected(endpoints, "third")
    assert (rejected.status_code, rejected.code, rejected.param) == (404, "model_not_found", "model")
    assert rejected.body["message"] == said  # type: ignore[index]
    with pytest.raises(openai.NotFoundError, match=said):
        await endpoints.client.models.retrieve("third")
    assert (by_grpc.code, by_grpc.text) == (grpc.StatusCode.NOT_FOUND, said)


async def test_unavailable_model_is_503_and_others_are_served(endpoints: Served, second: Completions) -> None:
    second.token_service = FakeTokenService(reject=ModelUnavailable("model 'second' has gone"))
    rejected, by_grpc = await _rejected(endpoints, "second")
    assert (rejected.status_code, rejected.code) == (503, "model_unavailable")
    assert (rejected.response.headers["retry-after"], by_grpc.code) == ("1", grpc.StatusCode.UNAVAILABLE)
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
