"""A closing router fails its probes first, serves on until load balancers have left, and then drains."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.process.ports import free_port
from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from frontend.service import RouterService
from tests.e2e.conftest import Checkpoint
from tests.support.identities import router
from tests.support.local_cluster import local_cluster
from tests.support.waiting import told

_SHORT = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}


async def test_probes_fail_while_calls_are_served(checkpoint: Checkpoint, redis_url: str) -> None:
    pool = {"kv_memory_gib": 0.01}
    ports: dict[str, Any] = {"grpc_port": free_port(), "http_port": free_port(), "shutdown_delay_s": 600.0}
    tree = {"model": {"dtype": "float32"}, "prefill": pool, "decode": pool, "router": ports}
    async with local_cluster(checkpoint("llama"), redis_url, **tree) as cluster:
        identity = cluster.identity(router("router-1"))
        service = await RouterService.open(cluster.spec, credentials=cluster.credentials, identity=identity)
        url = "http://{}:{}".format(*service.http_address)
        async with (
            httpx.AsyncClient(base_url=url, timeout=60) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel,
        ):

            async def is_ready() -> bool:
                return (await http.get("/health/ready")).status_code == 200

            await told(is_ready)
            closing = asyncio.ensure_future(service.close())  # fails the probes, then waits for the delay
            for path, status in (("/health/live", 200), ("/health/ready", 503), ("/health", 503), ("/v1/models", 200)):
                answer = await http.get(path)
                assert (answer.status_code, answer.headers["connection"]) == (status, "close")
            asked = health_pb2.HealthCheckRequest(service="readiness")
            assert (await health_pb2_grpc.HealthStub(channel).Check(asked)).status == 2  # NOT_SERVING
            answer = await http.post("/v1/completions", json=_SHORT)
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            generate = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), sampling=pb.SamplingParams(max_tokens=2))
            assert [event async for event in InferenceStub(channel).Generate(generate)]

            async with http.stream("POST", "/v1/completions", json=_SHORT | {"stream": True}) as stream:
                closing.cancel()
                with suppress(asyncio.CancelledError):
                    await closing
                draining = asyncio.ensure_future(service.close())  # skips the delay
                text = (await stream.aread()).decode()
            assert stream.headers["connection"] == "close" and text.endswith("data: [DONE]\n\n")
            await draining
            with pytest.raises(httpx.ConnectError):
                await http.get("/health/ready")
