"""Names and figures that a deployment shows without settings."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from frontend.access.access import Access
from frontend.grpc.api import open_grpc_api
from frontend.http.app import create_app
from frontend.text.completion import Models
from tests.cases.served import HI, Serve
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.tiny_service import MakeCompletions


async def test_model_has_several_names(completions: MakeCompletions) -> None:
    """anthropics/claude-code#41120: every name is listed and served, and each answer repeats the one in the request."""
    service = completions(FakeTokenService(), name="big", aliases=("haiku", "gpt-4o-mini"))
    other = completions(FakeTokenService(), name="other", aliases=("haiku",))
    models = Models(service)
    assert not models.add(other), "a name is taken"
    app = create_app(models, access=Access.anybody(), is_healthy=lambda: True)
    endpoint = await open_grpc_api(models, access=Access.anybody(), host="127.0.0.1", port=0)
    async with serve_http(app) as (host, port), http_client(base_url=f"http://{host}:{port}") as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["root"], one["parent"]) for one in listed] == [
            (name, "org/tiny", None) for name in ("big", "haiku", "gpt-4o-mini")
        ]
        assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()
        for name in ("big", "haiku", "gpt-4o-mini"):
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
            bodies: dict[str, dict[str, Any]] = {
                "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
                "/v1/completions": {"prompt": "hi", "max_tokens": 2},
                "/v1/responses": {"input": "hi", "max_output_tokens": 2},
                "/v1/messages": {"messages": HI, "max_tokens": 2},
            }
            for path, body in bodies.items():
                whole = await http.post(path, json={**body, "model": name})
                streamed = await http.post(path, json={**body, "model": name, "stream": True})
                assert whole.json()["model"] == name
                assert f'"model":"{name}"' in streamed.text
            assert (await http.post("/tokenize", json={"model": name, "prompt": "hi"})).status_code == 200
        missing = await http.post("/v1/completions", json={"model": "small", "prompt": "hi"})
        assert "'big', 'haiku' and 'gpt-4o-mini' are" in missing.json()["error"]["message"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.port}") as channel:
            stub = InferenceStub(channel)
            assert [one.id for one in (await stub.ListModels(pb.ListModelsRequest())).models] == [*models.names]
            assert [event async for event in stub.Generate(pb.GenerateRequest(model="haiku", prompt="hi"))]
    await endpoint.close(grace_s=0)
    service.close()
    other.close()


async def test_generated_tokens_are_counted_as_they_are_sent(serve: Serve) -> None:
    """Found on hosts: rates stood still while long answers ran, and jumped when they ended."""
    async with serve() as served:
        served.fake.hang_after = 3
        running = asyncio.create_task(served.post("/v1/completions", prompt="hi", max_tokens=5))
        await served.fake.is_hanging.wait()
        [counter] = served.service.metrics.generated_tokens.collect()
        assert counter.samples[0].value == 3
        served.fake.go_on.set()
        await running
