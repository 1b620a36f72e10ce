"""API keys at both endpoints: valid, missing and exhausted."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from core.rpc import inference_pb2 as pb
from core.spec.schema import RouterSpec
from frontend.access.limiter import WINDOW
from tests.frontend.access.keys import access_with, issue
from tests.support.serving import USER, Serve, refusal

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
ASKED = pb.GenerateRequest(prompt="abc", sampling=pb.SamplingParams(max_tokens=4))


async def test_key_is_accepted_by_both_endpoints(serve: Serve) -> None:
    known = issue("acme", tenant="team")
    served = await serve(access=access_with(known))
    client = served.openai(known)
    assert (await client.completions.create(**BODY)).choices[0].text == "abca"
    assert [model.id for model in (await client.models.list()).data] == ["tiny"]
    chunks = [chunk async for chunk in await client.completions.create(**BODY, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abca"
    events = [event async for event in served.call(ASKED, known)]
    assert "".join(event.delta.text for event in events) == "abca"
    assert {sent.tenant for sent in served.fake.started} == {"team"}
    with pytest.raises(openai.AuthenticationError) as caught:
        await served.openai(issue("other")).completions.create(**BODY)
    assert caught.value.code == "invalid_api_key"


_PATHS = ["completions", "chat/completions", "responses", "responses/x", "models", "models/x"]


@pytest.mark.parametrize("path", [*(f"/v1/{path}" for path in _PATHS), "/x", "/healthy"])  # not below /health
async def test_missing_key_is_rejected_with_a_reason(serve: Serve, path: str) -> None:
    served = await serve(access=access_with(issue("acme")))
    method = "GET" if "models" in path else "POST"
    for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": "Basic YTpi"}):
        answer = await served.http.request(method, path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
        error = answer.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert "sk-wrong" not in answer.text
    assert (await served.http.get("/health")).status_code == 200
    assert not served.fake.started


async def test_missing_key_is_rejected_before_the_body_is_read(serve: Serve) -> None:
    served = await serve(access=access_with(issue("acme")))
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n{")
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()


async def test_every_grpc_method_but_health_needs_a_key(serve: Serve) -> None:
    served = await serve(access=access_with(issue("acme")))
    reflection = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    calls = [
        served.call(ASKED),
        served.call(ASKED, issue("other")),
        served.stub.ListModels(pb.ListModelsRequest()),
        reflection.ServerReflectionInfo().read(),  # a client that is writing may get that error instead
    ]
    for call in calls:
        assert (await refusal(call)).code is grpc.StatusCode.UNAUTHENTICATED
    health = health_pb2_grpc.HealthStub(served.channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
    assert not served.fake.started


# ---- limits


async def test_rate_limit_headers_and_rejection(serve: Serve) -> None:
    known = issue("acme", rpm=3, tpm=1000)
    served = await serve(access=access_with(known))
    client = served.openai(known)
    whole = await client.completions.with_raw_response.create(**BODY)
    assert whole.headers["x-ratelimit-limit-requests"] == "3"
    assert whole.headers["x-ratelimit-remaining-requests"] == "2"
    assert whole.headers["x-ratelimit-reset-requests"].endswith("s")
    streamed = await client.completions.with_raw_response.create(**BODY, stream=True)
    assert streamed.headers["x-ratelimit-remaining-requests"] == "1"
    assert streamed.headers["x-ratelimit-limit-tokens"] == "1000"
    [chunk async for chunk in streamed.parse()]
    call = served.call(ASKED, known)
    assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "0"
    [event async for event in call]

    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(**BODY, stream=stream)
        assert caught.value.code == "rate_limit_exceeded"
        assert 0 < int(caught.value.response.headers["retry-after"]) <= WINDOW
        assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    call = served.call(ASKED, known)
    refused = await refusal(call)
    assert (refused.code, set(refused.details)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, {"ErrorInfo", "RetryInfo"})
    assert dict(await call.trailing_metadata())["x-ratelimit-remaining-requests"] == "0"
    assert len(served.fake.started) == 3


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_slot_is_held_while_an_answer_runs(serve: Serve, is_streamed: bool) -> None:
    known = issue("acme", concurrency=1)
    access = access_with(known)
    served = await serve(access=access)
    client = served.openai(known)
    served.fake.hang_after = 1
    running = asyncio.create_task(client.completions.create(**BODY, stream=is_streamed))
    await asyncio.wait_for(served.fake.is_hanging.wait(), 5)
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(**BODY)
    served.fake.hang_after = None
    served.fake.go_on.set()
    answer = await running
    if is_streamed:
        [chunk async for chunk in answer]
    await access.limits.settled()
    await client.completions.create(**BODY)


async def test_disconnected_client_returns_its_slot(serve: Serve) -> None:
    known = issue("acme", concurrency=1)
    access = access_with(known)
    served = await serve(access=access)
    client = served.openai(known)
    served.fake.hang_after = 2
    stream = await client.completions.create(**BODY, stream=True)
    await anext(aiter(stream))
    await asyncio.wait_for(served.fake.is_hanging.wait(), 5)
    await stream.close()
    await asyncio.wait_for(served.fake.has_ended.wait(), 5)
    call = served.call(ASKED, known)
    served.fake.is_hanging.clear()
    await call.read()
    await asyncio.wait_for(served.fake.is_hanging.wait(), 5)
    call.cancel()
    await asyncio.wait_for(served.fake.has_ended.wait(), 5)
    await access.limits.settled()
    served.fake.hang_after = None
    await client.completions.create(**BODY)


async def test_rejections_are_counted(serve: Serve) -> None:
    outcomes = list[str]()
    served = await serve(access=access_with(issue("acme"), count=outcomes.append))
    await served.http.get("/v1/models")
    await served.rejected(ASKED)
    assert outcomes == ["invalid_api_key"] * 2


async def test_rate_limited_requests_are_in_the_audit_log(serve: Serve, tmp_path: Path) -> None:
    known, audit_log = issue("acme", tenant="team", rpm=2, max_tokens=4), tmp_path / "audit.jsonl"
    served = await serve(access=access_with(known), audit_log=audit_log)
    client = served.openai(known)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(**BODY | {"max_tokens": 5})
    await client.completions.create(**BODY)
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(**BODY)
    await served.rejected(ASKED, known)
    lines = [json.loads(line) for line in audit_log.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["invalid_value", "completed", *["rate_limit_exceeded"] * 2]
    assert {(line["key"], line["tenant"]) for line in lines} == {(known.key.id, "team")}
    assert known.secret not in audit_log.read_text()


async def test_many_prompts_of_one_body_count_as_one_request(serve: Serve) -> None:
    known = issue("acme", rpm=1, concurrency=1, tpm=1000)
    served = await serve(access=access_with(known))
    body = BODY | {"prompt": ["ab", "cd", "ef"]}
    assert len((await served.openai(known).completions.create(**body)).choices) == 3


async def test_key_limits_on_answers_hold_at_both_endpoints(serve: Serve) -> None:
    known = issue("acme", max_tokens=3, priorities=(1, 2))
    served = await serve(access=access_with(known))
    client = served.openai(known)
    with pytest.raises(openai.BadRequestError, match="is 4; this API key allows at most 3") as caught:
        await client.completions.create(**BODY)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="is 4; this API key allows at most 3") as caught:
        await client.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=4)
    assert caught.value.param == "max_completion_tokens"
    answer = await client.chat.completions.create(model="tiny", messages=USER)
    assert answer.choices[0].finish_reason == "length" and answer.usage and answer.usage.completion_tokens == 3
    assert (await served.rejected(ASKED, known)).code is grpc.StatusCode.INVALID_ARGUMENT
    await served.generate(pb.GenerateRequest(prompt="abc", priority=-9), known)
    assert [sent.priority for sent in served.fake.started] == [1, 1]


# ---- web pages


async def test_cors_preflight_needs_no_key(serve: Serve) -> None:
    known, page = issue("acme"), "https://chat.example.com"
    http = (await serve(access=access_with(known), spec=RouterSpec(cors_origins=page))).http
    names = "authorization,x-stainless-os"
    beforehand = {"access-control-request-method": "POST", "access-control-request-headers": names}
    for origin, allowed in ((page, True), ("https://elsewhere.example.com", False)):
        asked = await http.options("/v1/completions", headers={"origin": origin, **beforehand})
        assert asked.is_success is allowed
        assert (asked.headers.get("access-control-allow-origin") == page) is allowed
    asked = await http.options("/v1/models", headers={"origin": page, **beforehand})
    assert "authorization" in asked.headers["access-control-allow-headers"]
    for (key, status), stream in product(((known.header, 200), ("", 401)), (False, True)):
        headers = {"origin": page, "authorization": key}
        answer = await http.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers)
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == page


# ---- tenants


async def test_both_endpoints_derive_the_same_salt_from_a_key(serve: Serve) -> None:
    one, other = issue("one"), issue("other")
    salts: dict[tuple[str, str], set[str]] = {}
    served = await serve(access=access_with(one, other))
    for issued, salt in product((one, other), ("", "s")):
        served.fake.started.clear()
        await served.openai(issued).completions.create(**BODY, user="victim", extra_body={"cache_salt": salt})
        asked = pb.GenerateRequest(prompt="abc", sampling=ASKED.sampling, tenant="victim", cache_salt=salt)
        await served.generate(asked, issued)
        salts[issued.key.name, salt] = {sent.salt for sent in served.fake.started}
        assert {sent.user for sent in served.fake.started} == {"victim"}
    assert all(len(found) == 1 for found in salts.values())
    assert len(set.union(*salts.values())) == 4 and "" not in set.union(*salts.values())
