"""API keys at both endpoints: valid, missing and exhausted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_status import rpc_status

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from core.spec.schema import RouterSpec
from frontend.access.access import Access
from frontend.access.limiter import WINDOW
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from tests.frontend.access.keys import IssuedKey, access_with, issue
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.sdk_clients import openai_client
from tests.support.tiny_service import MakeCompletions


@dataclass
class Endpoints:
    fake: FakeTokenService
    http: httpx.AsyncClient
    stub: InferenceStub
    channel: grpc.aio.Channel
    url: str

    @asynccontextmanager
    async def openai(self, issued: IssuedKey | str, **more: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        secret = issued if isinstance(issued, str) else issued.secret
        async with openai_client(base_url=f"{self.url}/v1", api_key=secret, **more) as client:
            yield client

    def generate(self, issued: IssuedKey | None, **fields: Any) -> Any:
        metadata = (("authorization", issued.header),) if issued else ()
        return self.stub.Generate(pb.GenerateRequest(**fields), metadata=metadata, timeout=30)


@asynccontextmanager
async def both(
    completions: MakeCompletions, access: Access, *, audit_log: Path | None = None
) -> AsyncIterator[Endpoints]:
    fake = FakeTokenService()
    service = completions(fake, audit_log=audit_log)
    endpoint = await open_grpc_api(service, access=access, host="127.0.0.1", port=0)
    try:
        async with (
            serve_http(create_app(service, access=access, is_healthy=lambda: True)) as (host, port),
            http_client(base_url=f"http://{host}:{port}") as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel,
        ):
            yield Endpoints(fake, http, InferenceStub(channel), channel, f"http://{host}:{port}")
    finally:
        await endpoint.close(grace_s=0)
        await access.close()
        service.close()


BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
ASKED = {"prompt": "abc", "sampling": pb.SamplingParams(max_tokens=4)}


async def test_key_is_accepted_by_both_endpoints(completions: MakeCompletions) -> None:
    known = issue("acme", tenant="team")
    async with both(completions, access_with(known)) as endpoints:
        async with endpoints.openai(known) as client:
            assert (await client.completions.create(**BODY)).choices[0].text == "abca"
            assert [model.id for model in (await client.models.list()).data] == ["tiny"]
            chunks = [chunk async for chunk in await client.completions.create(**BODY, stream=True)]
            assert "".join(chunk.choices[0].text for chunk in chunks) == "abca"
        events = [event async for event in endpoints.generate(known, **ASKED)]
        assert "".join(event.delta.text for event in events) == "abca"
        assert {sent.tenant for sent in endpoints.fake.started} == {"team"}


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/x",
        "/v1/models",
        "/v1/models/x",
        "/x",
        "/healthy",  # is not below /health
    ],
)
async def test_missing_key_is_rejected_with_a_reason(completions: MakeCompletions, path: str) -> None:
    async with both(completions, access_with(issue("acme"))) as endpoints:
        method = "GET" if "models" in path else "POST"
        for headers in ({}, {"authorization": "Bearer sk-wrong"}, {"authorization": "Basic YTpi"}):
            answer = await endpoints.http.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")
            error = answer.json()["error"]
            assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
            assert "sk-wrong" not in answer.text
        assert (await endpoints.http.get("/health")).status_code == 200
        assert not endpoints.fake.started


async def test_openai_client_raises_authentication_error(completions: MakeCompletions) -> None:
    async with both(completions, access_with(issue("acme"))) as endpoints, endpoints.openai("sk-wrong") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.completions.create(**BODY)
    assert caught.value.code == "invalid_api_key"


async def test_missing_key_is_rejected_before_the_body_is_read(completions: MakeCompletions) -> None:
    async with both(completions, access_with(issue("acme"))) as endpoints:
        reader, writer = await asyncio.open_connection(*endpoints.url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n{")
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


async def test_every_grpc_method_but_health_needs_a_key(completions: MakeCompletions) -> None:
    async with both(completions, access_with(issue("acme"))) as endpoints:
        reflection = reflection_pb2_grpc.ServerReflectionStub(endpoints.channel)
        calls = [
            endpoints.generate(None, **ASKED).read(),
            endpoints.generate(issue("other"), **ASKED).read(),
            endpoints.stub.ListModels(pb.ListModelsRequest()),
            reflection.ServerReflectionInfo().read(),  # a client that is writing may get that error instead
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(endpoints.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        assert not endpoints.fake.started


async def test_any_key_is_accepted_if_none_is_required(completions: MakeCompletions) -> None:
    async with both(completions, access_with(issue("acme"), is_required=False)) as endpoints:
        async with endpoints.openai("none") as client:
            assert (await client.completions.create(**BODY)).choices[0].text == "abca"
        assert [event async for event in endpoints.generate(None, **ASKED)]


# ---- limits


async def test_rate_limit_headers_and_rejection(completions: MakeCompletions) -> None:
    known = issue("acme", rpm=3, tpm=1000)
    async with both(completions, access_with(known)) as endpoints, endpoints.openai(known) as client:
        whole = await client.completions.with_raw_response.create(**BODY)
        assert whole.headers["x-ratelimit-limit-requests"] == "3"
        assert whole.headers["x-ratelimit-remaining-requests"] == "2"
        assert whole.headers["x-ratelimit-reset-requests"].endswith("s")
        streamed = await client.completions.with_raw_response.create(**BODY, stream=True)
        assert streamed.headers["x-ratelimit-remaining-requests"] == "1"
        assert streamed.headers["x-ratelimit-limit-tokens"] == "1000"
        [chunk async for chunk in streamed.parse()]
        call = endpoints.generate(known, **ASKED)
        assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "0"
        [event async for event in call]

        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(**BODY, stream=stream)
            assert caught.value.code == "rate_limit_exceeded"
            assert 0 < int(caught.value.response.headers["retry-after"]) <= WINDOW
            assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        call = endpoints.generate(known, **ASKED)
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await call.read()
        assert rejected.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = rpc_status.from_call(rejected.value)
        assert status and {detail.TypeName().rpartition(".")[2] for detail in status.details} == {
            "ErrorInfo",
            "RetryInfo",
        }
        assert dict(await call.trailing_metadata())["x-ratelimit-remaining-requests"] == "0"
        assert len(endpoints.fake.started) == 3


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_slot_is_held_while_an_answer_runs(completions: MakeCompletions, is_streamed: bool) -> None:
    known = issue("acme", concurrency=1)
    access = access_with(known)
    async with both(completions, access) as endpoints, endpoints.openai(known) as client:
        endpoints.fake.hang_after = 1
        running = asyncio.create_task(client.completions.create(**BODY, stream=is_streamed))
        await asyncio.wait_for(endpoints.fake.is_hanging.wait(), 5)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(**BODY)
        endpoints.fake.hang_after = None
        endpoints.fake.go_on.set()
        answer = await running
        if is_streamed:
            [chunk async for chunk in answer]
        await access.limits.settled()
        await client.completions.create(**BODY)


async def test_disconnected_client_returns_its_slot(completions: MakeCompletions) -> None:
    known = issue("acme", concurrency=1)
    access = access_with(known)
    async with both(completions, access) as endpoints, endpoints.openai(known) as client:
        endpoints.fake.hang_after = 2
        stream = await client.completions.create(**BODY, stream=True)
        await anext(aiter(stream))
        await asyncio.wait_for(endpoints.fake.is_hanging.wait(), 5)
        await stream.close()
        await asyncio.wait_for(endpoints.fake.has_ended.wait(), 5)
        call = endpoints.generate(known, **ASKED)
        endpoints.fake.is_hanging.clear()
        await call.read()
        await asyncio.wait_for(endpoints.fake.is_hanging.wait(), 5)
        call.cancel()
        await asyncio.wait_for(endpoints.fake.has_ended.wait(), 5)
        await access.limits.settled()
        endpoints.fake.hang_after = None
        await client.completions.create(**BODY)


async def test_rejections_are_counted(completions: MakeCompletions) -> None:
    outcomes = list[str]()
    async with both(completions, access_with(issue("acme"), count=outcomes.append)) as endpoints:
        await endpoints.http.get("/v1/models")
        with pytest.raises(grpc.aio.AioRpcError):
            await endpoints.generate(None, **ASKED).read()
    assert outcomes == ["invalid_api_key"] * 2


async def test_rate_limited_requests_are_in_the_audit_log(completions: MakeCompletions, tmp_path: Path) -> None:
    known, audit_log = issue("acme", tenant="team", rpm=2, max_tokens=4), tmp_path / "audit.jsonl"
    async with (
        both(completions, access_with(known), audit_log=audit_log) as endpoints,
        endpoints.openai(known) as client,
    ):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**BODY | {"max_tokens": 5})
        await client.completions.create(**BODY)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(**BODY)
        with pytest.raises(grpc.aio.AioRpcError):
            await endpoints.generate(known, **ASKED).read()
    lines = [json.loads(line) for line in audit_log.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["invalid_value", "completed", *["rate_limit_exceeded"] * 2]
    assert {(line["key"], line["tenant"]) for line in lines} == {(known.key.id, "team")}
    assert known.secret not in audit_log.read_text()


async def test_many_prompts_of_one_body_count_as_one_request(completions: MakeCompletions) -> None:
    known = issue("acme", rpm=1, concurrency=1, tpm=1000)
    async with both(completions, access_with(known)) as endpoints, endpoints.openai(known) as client:
        body = BODY | {"prompt": ["ab", "cd", "ef"]}
        assert len((await client.completions.create(**body)).choices) == 3


async def test_key_limits_on_answers_hold_at_both_endpoints(completions: MakeCompletions) -> None:
    known = issue("acme", max_tokens=3, priorities=(1, 2))
    async with both(completions, access_with(known)) as endpoints, endpoints.openai(known) as client:
        with pytest.raises(openai.BadRequestError, match="is 4; this API key allows at most 3") as caught:
            await client.completions.create(**BODY)
        assert caught.value.param == "max_tokens"
        user: Any = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.BadRequestError, match="is 4; this API key allows at most 3") as caught:
            await client.chat.completions.create(model="tiny", messages=user, max_completion_tokens=4)
        assert caught.value.param == "max_completion_tokens"
        answer = await client.chat.completions.create(model="tiny", messages=user)
        assert answer.choices[0].finish_reason == "length" and answer.usage and answer.usage.completion_tokens == 3
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await endpoints.generate(known, **ASKED).read()
        assert rejected.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        [event async for event in endpoints.generate(known, prompt="abc", priority=-9)]
        assert [sent.priority for sent in endpoints.fake.started] == [1, 1]


# ---- web pages


async def test_cors_preflight_needs_no_key(
    completions: MakeCompletions,
) -> None:
    known, page = issue("acme"), "https://chat.example.com"
    service = completions(FakeTokenService())
    app = create_app(service, access=access_with(known), is_healthy=lambda: True, spec=RouterSpec(cors_origins=page))
    beforehand = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-os",
    }
    async with serve_http(app) as (host, port), http_client(base_url=f"http://{host}:{port}") as http:
        for origin, allowed in ((page, True), ("https://elsewhere.example.com", False)):
            asked = await http.options("/v1/completions", headers={"origin": origin, **beforehand})
            assert asked.is_success is allowed
            assert (asked.headers.get("access-control-allow-origin") == page) is allowed
        assert (
            "authorization"
            in (await http.options("/v1/models", headers={"origin": page, **beforehand})).headers[
                "access-control-allow-headers"
            ]
        )
        for key, status in ((known.header, 200), ("", 401)):
            for stream in (False, True):
                headers = {"origin": page, "authorization": key}
                answer = await http.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers)
                assert answer.status_code == status and answer.headers["access-control-allow-origin"] == page
    service.close()


# ---- tenants


async def test_both_endpoints_derive_the_same_salt_from_a_key(completions: MakeCompletions) -> None:
    one, other = issue("one"), issue("other")
    salts: dict[tuple[str, str], set[str]] = {}
    async with both(completions, access_with(one, other)) as endpoints:
        for issued in (one, other):
            for salt in ("", "s"):
                endpoints.fake.started.clear()
                async with endpoints.openai(issued) as client:
                    await client.completions.create(**BODY, user="victim", extra_body={"cache_salt": salt})
                [event async for event in endpoints.generate(issued, **ASKED, tenant="victim", cache_salt=salt)]
                salts[issued.key.name, salt] = {sent.salt for sent in endpoints.fake.started}
                assert {sent.user for sent in endpoints.fake.started} == {"victim"}
    assert all(len(found) == 1 for found in salts.values())
    assert len(set.union(*salts.values())) == 4 and "" not in set.union(*salts.values())
