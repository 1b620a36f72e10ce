"""A pool smaller than the model's context: every number that clients see is what the pool holds."""

from __future__ import annotations

from typing import Any

import httpx

from core.model import config as model_config
from core.process.ports import free_port
from frontend.service import RouterService
from tests.e2e.conftest import Checkpoint
from tests.support.identities import router
from tests.support.local_cluster import local_cluster
from tests.support.waiting import told


async def test_clients_see_what_the_pool_holds(checkpoint: Checkpoint, redis_url: str) -> None:
    pool = {"kv_memory_gib": 0.00007}
    ports: dict[str, Any] = {"grpc_port": free_port(), "http_port": free_port()}
    tree = {"model": {"dtype": "float32"}, "prefill": pool, "decode": pool, "router": ports}
    model_dir = checkpoint("llama")
    async with local_cluster(model_dir, redis_url, **tree) as cluster:
        identity = cluster.identity(router("router-1"))
        service = await RouterService.open(cluster.spec, credentials=cluster.credentials, identity=identity)
        async with httpx.AsyncClient(base_url="http://{}:{}".format(*service.http_address), timeout=60) as http:

            async def is_ready() -> bool:
                return (await http.get("/health/ready")).status_code == 200

            await told(is_ready)
            limit = (await http.get("/v1/models")).json()["data"][0]["max_model_len"]
            assert limit < model_config.load(model_dir).max_context
            body = {"prompt": [5] * (limit - 8), "ignore_eos": True}
            whole = await http.post("/v1/completions", json={**body, "max_tokens": 8})
            assert whole.status_code == 200 and whole.json()["usage"]["total_tokens"] == limit, whole.text
            for refused in ({**body, "max_tokens": 9}, {"prompt": [5] * limit}):
                answer = await http.post("/v1/completions", json=refused)
                assert answer.status_code == 400 and f"holds {limit} tokens" in answer.json()["error"]["message"]
            await service.close()
