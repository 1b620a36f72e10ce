"""A router that serves nothing but /health: the replicas that the controller calls ready."""

from __future__ import annotations

from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from cluster.control.controller import ACTOR_NAME
from cluster.control.desired import namespace

app = FastAPI()


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress(app)
class FakeRouter:
    def __init__(self, name: str) -> None:
        self._controller = ray.get_actor(ACTOR_NAME, namespace=namespace(name))

    @app.get("/health")
    async def health(self) -> dict[str, int]:
        pools = (await self._controller.status.remote())["pools"]
        return {role: pool["ready"] for role, pool in pools.items()}


def build(
    spec: dict[str, Any],
    index_url: str,
    log_dir: str,
    credentials: dict[str, str],
    actor_options: dict[str, Any],
) -> serve.Application:
    return FakeRouter.bind(spec["name"])
