"""Router without a model that reports the controller's ready replicas on its admin port."""

from __future__ import annotations

import asyncio
import contextlib

import ray
from ray import serve

from cluster.ray.store import CONTROLLER, namespace
from core.spec.schema import Spec
from core.types.launch import Launch
from frontend.admin.admin_server import create_admin_app, open_admin_listener


@serve.deployment(ray_actor_options={"num_cpus": 0})
class FakeRouter:
    async def __init__(self, spec: Spec) -> None:
        self._controller = ray.get_actor(CONTROLLER, namespace=namespace(spec.name))
        self._seen: dict[str, int] = {}
        admin = create_admin_app(
            deployment=spec.name,
            router="router-0",
            health=lambda: self._seen,
            is_ready=lambda: bool(self._seen.get("decode")),
            metrics=lambda: b"",
            explain_route=lambda request_id: {},
        )
        router = spec.router
        self._listener = await open_admin_listener(admin, host=router.admin_host, ports=router.admin_ports)
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            pools = (await self._controller.status.remote())["pools"]
            self._seen = {role: pool["ready"] for role, pool in pools.items()}
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 0.1)


def build(launch: Launch) -> serve.Application:
    return FakeRouter.bind(launch.spec)
