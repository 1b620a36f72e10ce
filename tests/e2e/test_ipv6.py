"""A deployment on IPv6: ranks, their transfers and both endpoints of a router."""

from __future__ import annotations

import grpc
import httpx
import pytest

from core.process.ports import free_port
from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from core.types.network import format_address
from core.types.request import Sampling
from frontend.service import RouterService
from tests.e2e.conftest import Checkpoint
from tests.engine.steps import prompts
from tests.support.identities import router
from tests.support.ipv6 import needs_ipv6
from tests.support.local_cluster import local_cluster
from tests.support.waiting import becomes

pytestmark = needs_ipv6


@pytest.mark.parametrize("tls", ["auto", "off"])
async def test_ranks_reach_each_other(checkpoint: Checkpoint, redis_url: str, tls: str) -> None:
    tree = {"prefill": {"kv_memory_gib": 0.01}, "decode": {"kv_memory_gib": 0.01}, "security": {"tls": tls}}
    async with local_cluster(
        checkpoint("llama"), redis_url, host="::1", router={"max_local_prefill": 0}, **tree
    ) as cluster:
        answer = await cluster.generate(prompts(70)[0], Sampling(max_tokens=4, temperature=0.0))
        assert answer.route.prefill_replica and len(answer.ids) == 4
        assert all(replica.member.address.startswith("[::1]:") for replica in cluster.replicas)


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
async def test_both_endpoints_listen(smollm2_dir: str, redis_url: str, host: str) -> None:
    pool = {"replicas": 0}
    doors = {"host": host, "admin_host": "::1", "keys": "none", "grpc_port": free_port("::1")}
    doors["http_port"] = free_port("::1")
    async with local_cluster(smollm2_dir, redis_url, prefill=pool, decode=pool, router=doors) as cluster:
        spec = cluster.spec
        assert spec.router.host
        service = await RouterService.open(
            spec, credentials=cluster.credentials, identity=cluster.identity(router("router-1")), host=spec.router.host
        )
        try:
            async with httpx.AsyncClient() as client:
                health = await client.get(f"http://{format_address('::1', spec.router.http_port)}/health/live")
                admin = await client.get(f"http://{format_address(*service.admin_address)}/health")
            assert health.status_code == 200 and admin.json()["deployment"] == spec.name
            async with grpc.aio.insecure_channel(format_address("::1", service.grpc_port)) as channel:
                assert await rpc.InferenceStub(channel).ListModels(pb.ListModelsRequest())
            await becomes(service.is_live)
        finally:
            await service.close()
