"""max_tokens beyond the context, and the context that replicas can really hold, at every API."""

from __future__ import annotations

from typing import Any

import pytest

from core.rpc import inference_pb2 as pb
from core.spec.schema import RouterSpec
from tests.frontend.access.keys import access_with, issue
from tests.support.serving import USER, Serve, Served

_CONTEXT = 64
_BOUNDS: dict[str, dict[str, Any]] = {  # max_tokens is an upper bound
    "/v1/messages": {"messages": USER, "max_tokens": 32_000},
    "/v1/responses": {"input": "hi", "max_output_tokens": 32_000},
}
_EXACT: dict[str, dict[str, Any]] = {  # max_tokens must fit, unless the deployment clamps it
    "/v1/chat/completions": {"messages": USER, "max_tokens": 32_000},
    "/v1/chat/completions newer": {"messages": USER, "max_completion_tokens": 32_000, "n": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 32_000},
}


@pytest.fixture
def serve_short(serve: Serve) -> Serve:
    """The context is short, and no answer ends by itself."""

    async def opened(**options: Any) -> Served:
        served = await serve(**{"max_context": _CONTEXT} | options)
        served.fake.script = lambda *_: [40]
        return served

    return opened


def _reason(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["finish_reason"])
    return str(answer.get("stop_reason") or answer["incomplete_details"]["reason"])


@pytest.mark.parametrize("path", _BOUNDS)
async def test_upper_bounds_are_clamped_to_the_context(serve_short: Serve, path: str) -> None:
    served = await serve_short()
    answer = await served.http.post(path, json=_BOUNDS[path])
    assert answer.status_code == 200, answer.text
    assert _reason(answer.json()) == {"/v1/messages": "max_tokens"}.get(path, "max_output_tokens")
    (started,) = served.fake.started
    assert started.sampling.max_tokens == _CONTEXT - started.num_prompt_tokens
    long = {**_BOUNDS[path], "messages" if "messages" in _BOUNDS[path] else "input": "x" * 500}
    if "messages" in long:
        long["messages"] = [{"role": "user", "content": long["messages"]}]
    refused = await served.http.post(path, json=long)
    assert refused.status_code == 400 and f"holds {_CONTEXT} tokens" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", _EXACT)
@pytest.mark.parametrize("treatment", ["refuse", "clamp"])
async def test_other_apis_refuse_or_clamp_as_the_spec_says(serve_short: Serve, path: str, treatment: Any) -> None:
    served = await serve_short(spec=RouterSpec(max_tokens_beyond_context=treatment))
    answer = await served.http.post(path.split()[0], json=_EXACT[path])
    if treatment == "refuse":
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        return
    assert (answer.status_code, _reason(answer.json())) == (200, "length")
    assert served.fake.started[0].sampling.max_tokens == _CONTEXT - served.fake.started[0].num_prompt_tokens


async def test_truncated_prompt_leaves_half_of_the_context(serve_short: Serve) -> None:
    served = await serve_short()
    for text, num_prompt in (("hi", None), ("x" * 60, _CONTEXT // 2)):
        body = {"input": text, "max_output_tokens": 32_000, "truncation": "auto"}
        assert (await served.http.post("/v1/responses", json=body)).status_code == 200
        started = served.fake.started[-1]
        assert num_prompt in (None, started.num_prompt_tokens)
        assert started.sampling.max_tokens == _CONTEXT - started.num_prompt_tokens


async def test_limits_of_a_key_bound_the_answer_too(serve_short: Serve) -> None:
    short, slow = issue("short", max_tokens=5), issue("slow", tpm=50)
    served = await serve_short(access=access_with(short, slow))
    for path, body in _BOUNDS.items():
        for key in (short, slow):
            answer = await served.http.post(path, json=body, headers={"authorization": key.header})
            assert answer.status_code == (200 if key is short or path == "/v1/messages" else 429), answer.text
    assert [one.sampling.max_tokens for one in served.fake.started if one.sampling.max_tokens <= 5] == [5, 5]
    refused = await served.http.post(
        "/v1/completions", json=_EXACT["/v1/completions"], headers={"authorization": short.header}
    )
    assert refused.status_code == 400 and "allows at most 5" in refused.text


async def test_every_api_names_what_a_replica_holds(serve_short: Serve) -> None:
    """The pool is smaller than the context at first, then larger."""
    held: list[int | None] = [40]
    served = await serve_short(max_held=lambda: held[0])
    for limit in (40, _CONTEXT):
        assert (await served.http.get("/v1/models")).json()["data"][0]["max_model_len"] == limit
        assert (await served.http.get("/v1/models/tiny")).json()["max_model_len"] == limit
        assert (await served.http.post("/tokenize", json={"prompt": "hi"})).json()["max_model_len"] == limit
        for path, body in _EXACT.items():
            refused = await served.http.post(path.split()[0], json=body)
            assert f"holds {limit} tokens" in refused.json()["error"]["message"]
        answer = await served.http.post("/v1/completions", json={"prompt": list(range(30)), "max_tokens": limit - 30})
        assert answer.status_code == 200 and answer.json()["usage"]["total_tokens"] == limit
        assert (await served.stub.ListModels(pb.ListModelsRequest())).models[0].max_context == limit
        assert (await served.stub.Tokenize(pb.TokenizeRequest(prompt="hi"))).max_context == limit
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(70)))
        assert f"holds {limit} tokens" in (await served.rejected(asked)).text
        held[0] = 1000


async def test_official_clients_get_clamped_answers(serve_short: Serve) -> None:
    served = await serve_short()
    async with served.anthropic().messages.stream(model="tiny", messages=USER, max_tokens=32_000) as stream:
        assert (await stream.get_final_message()).stop_reason == "max_tokens"
    response = await served.client.responses.create(model="tiny", input="hi", max_output_tokens=32_000)
    assert response.status == "incomplete"
