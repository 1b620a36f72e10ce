"""The router as a Ray Serve deployment: Serve places and watches it, and brings it HTTP; the gRPC door is its own."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from fastapi import FastAPI
from ray import serve

from cluster.control.asking import ask_controller
from cluster.control.certificates import open_identity
from cluster.process.log import redirect_output
from cluster.words.errors import ReplicaFailed
from cluster.words.launch import Launch
from cluster.words.process_name import ProcessName
from router.service import RouterService

_MAX_REQUESTS = 100_000  # Serve's own limit must never be the one that bites: dispatch knows better when to refuse

_LEAVE_S = 15.0  # a router's way out, beside the requests


def build(launch: Launch, actor_options: dict[str, Any]) -> serve.Application:
    """The application that the control plane deploys. Each replica has a log of its own in log_dir, on its node.

    actor_options: Ray's, which say on which nodes replicas may run.
    """
    router = launch.spec.router
    deployment = serve.deployment(
        name="router",
        num_replicas=router.replicas,
        max_ongoing_requests=_MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0, **actor_options},
        health_check_period_s=2,
        health_check_timeout_s=10,
        # Serve waits for its own requests first, then for close(), which waits for those of the gRPC door.
        graceful_shutdown_timeout_s=2 * launch.spec.timeouts.drain_s + _LEAVE_S,
    )(serve.ingress()(Router))
    return deployment.bind(launch)


class Router:
    """One router replica."""

    # Serve awaits it.
    async def __init__(self, launch: Launch) -> None:  # type: ignore[misc]
        spec, log_dir = launch.spec, launch.log_dir
        name = f"router-{uuid4().hex[:8]}"
        log = f"router-{time.strftime('%Y%m%d-%H%M%S')}-{name.removeprefix('router-')}.log"  # by name is by start
        redirect_output(Path(log_dir) / log, who=name)
        host = spec.router.host or ray.util.get_node_ip_address()
        trail = Path(log_dir).with_name("trail") / Path(log).with_suffix(".jsonl")  # logs are cleared, this is not
        who = ProcessName.of_router(spec.name, name)
        identity = await asyncio.to_thread(open_identity, who, tls=spec.security.tls)
        self._service = await RouterService.open(
            spec,
            credentials=launch.credentials,
            identity=identity,
            host=host,
            trail=trail,
            keys=await asyncio.to_thread(ask_controller, spec.name, "keys"),
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._service.http_app(proxy_sets_request_id=True)

    async def check_health(self) -> None:
        """Serve asks every few seconds, and starts another replica where this raises."""
        if not self._service.is_live():
            raise ReplicaFailed("tasks of this router keep dying; its log says more")

    async def __del__(self) -> None:
        await self._service.close()
