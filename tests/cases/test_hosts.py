"""Hosts with IPv6 addresses, links that break, and routers that leave a load balancer."""

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
from core.types.network import format_address
from core.types.request import Role, Sampling
from frontend.service import RouterService
from tests.e2e.conftest import Checkpoint
from tests.engine.steps import prompts
from tests.router.serving import scenarios
from tests.router.serving.conftest import quiet  # noqa: F401
from tests.router.serving.serving_model import World
from tests.router.serving.virtual_time import until
from tests.support.grids import quick
from tests.support.identities import router
from tests.support.ipv6 import needs_ipv6
from tests.support.local_cluster import local_cluster
from tests.support.plain_http import http_client
from tests.support.waiting import becomes, told


@needs_ipv6
@pytest.mark.parametrize("tls", ["auto", "off"])
async def test_ranks_reach_each_other(checkpoint: Checkpoint, redis_url: str, tls: str) -> None:
    """ray-project/ray#56147, sgl-project/sglang#3949"""
    tree = {"prefill": {"kv_memory_gib": 0.01}, "decode": {"kv_memory_gib": 0.01}, "security": {"tls": tls}}
    async with local_cluster(
        checkpoint("llama"), redis_url, host="::1", router={"max_local_prefill": 0}, **tree
    ) as cluster:
        answer = await cluster.generate(prompts(70)[0], Sampling(max_tokens=4, temperature=0.0))
        assert answer.route.prefill_replica and len(answer.ids) == 4
        assert all(replica.member.address.startswith("[::1]:") for replica in cluster.replicas)


@needs_ipv6
@pytest.mark.parametrize("host", quick(["::1", "[::1]", "::"], ["[::1]", "::"]))
async def test_both_endpoints_listen(smollm2_dir: str, redis_url: str, host: str) -> None:
    """vllm-project/tpu-inference#3467, NovaSky-AI/SkyRL#612"""
    pool = {"replicas": 0}
    endpoints: dict[str, Any] = {
        "host": host,
        "shutdown_delay_s": 0.0,
        "admin_host": "::1",
        "keys": "none",
        "grpc_port": free_port("::1"),
    }
    endpoints["http_port"] = free_port("::1")
    async with local_cluster(smollm2_dir, redis_url, prefill=pool, decode=pool, router=endpoints) as cluster:
        spec = cluster.spec
        assert spec.router.host
        service = await RouterService.open(
            spec, credentials=cluster.credentials, identity=cluster.identity(router("router-1")), host=spec.router.host
        )
        try:
            async with http_client() as client:
                health = await client.get(f"http://{format_address('::1', spec.router.http_port)}/health/live")
                admin = await client.get(f"http://{format_address(*service.admin_address)}/health")
            assert health.status_code == 200 and admin.json()["deployment"] == spec.name
            async with grpc.aio.insecure_channel(format_address("::1", service.grpc_port)) as channel:
                assert await InferenceStub(channel).ListModels(pb.ListModelsRequest())
            await becomes(service.is_live)
        finally:
            await service.close()


_SHORT = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}


async def test_probes_fail_while_calls_are_served(checkpoint: Checkpoint, redis_url: str) -> None:
    """sgl-project/sglang#38744, kserve/kserve#5485, llm-d/llm-d#2444, vllm-project/vllm#43208"""
    pool = {"kv_memory_gib": 0.01}
    ports: dict[str, Any] = {"grpc_port": free_port(), "http_port": free_port(), "shutdown_delay_s": 600.0}
    tree = {"model": {"dtype": "float32"}, "prefill": pool, "decode": pool, "router": ports}
    async with local_cluster(checkpoint("llama"), redis_url, **tree) as cluster:
        identity = cluster.identity(router("router-1"))
        service = await RouterService.open(cluster.spec, credentials=cluster.credentials, identity=identity)
        url = "http://{}:{}".format(*service.http_address)
        async with (
            http_client(base_url=url, timeout=60) as http,
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


def test_a_request_that_met_a_broken_link_continues_on_that_prefill_replica() -> None:
    """Found on hosts: the prefill replica had been avoided for good since its link was down for ten seconds."""

    async def play(world: World) -> None:
        world.local_decode_share = 0.5
        prefill, decode = world.add(Role.PREFILL), world.add(Role.DECODE)
        await until(lambda: all(replica.is_usable for replica in world.replicas))
        prefill.unreachable = {decode.name}
        client = world.ask(num_tokens=100, n=1, max_tokens=300)
        await until(lambda: len(client.received.get(0, [])) > 30)
        decode.kill()
        await until(lambda: prefill.running())
        await until(lambda: client.is_over)
        assert client.error is None

    for seed in range(4):
        scenarios.play(play, seed)
