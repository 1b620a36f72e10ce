"""Requests with boundary values in every field, on both endpoints of a real deployment, kill no replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from frontend.openai.types import TextBody
from tests.e2e.conftest import Lab
from tests.frontend.http.both_endpoints import BothDoors
from tests.frontend.http.fuzzed_requests import grpc_requests, json_bodies
from tests.support.local_cluster import LocalCluster
from tests.support.plain_http import http_client
from tests.support.router_service import http_url, router_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_SOME = settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck))
_TEXT = json_bodies(TextBody.model_fields, input_field="prompt")


@asynccontextmanager
async def _open(model: Path, lab: Lab) -> AsyncIterator[tuple[LocalCluster, httpx.AsyncClient, InferenceStub]]:
    tree = {
        "model": {"dtype": "float32", "max_context": 64},
        "kv": {"wire_dtype": "raw"},
        "decode": {"max_running": 8},
    }
    async with (
        lab.own(model, **tree) as cluster,
        router_service(cluster) as service,
        http_client(base_url=http_url(service)) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel,
    ):
        yield cluster, http, InferenceStub(channel)


@pytest.fixture(scope="module")
def endpoints(smollm2_dir: Path, lab: Lab) -> Iterator[BothDoors]:
    with asyncio.Runner() as runner:
        opened = _open(smollm2_dir, lab)
        cluster, http, stub = runner.run(opened.__aenter__())
        yield BothDoors(runner, http, stub)
        assert all(replica.is_alive for pool in cluster.pools.values() for replica in pool)
        runner.run(opened.__aexit__(None, None, None))


_KILLER = {"prompt": '"Hello there"', "repetition_penalty": "1e-40", "logprobs": "1", "max_tokens": "2"}


@_SOME
@given(_TEXT)
@example(_KILLER)
def test_texts(endpoints: BothDoors, body: dict[str, str]) -> None:
    endpoints.post("/v1/completions", body)


@_SOME
@given(grpc_requests())
def test_grpc(endpoints: BothDoors, request_: pb.GenerateRequest) -> None:
    endpoints.generate(request_)
