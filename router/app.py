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

from cluster.control.certificates import open_identity
from cluster.process.log import redirect_output
from cluster.words.credentials import Credentials
from cluster.words.process_name import ProcessName
from cluster.words.spec_file import parse_spec
from router.service import RouterService

_MAX_REQUESTS = 100_000  # Serve's own limit must never be the one that bites: dispatch knows better when to refuse


def build(
    spec: dict[str, Any],
    index_url: str,
    log_dir: str,
    credentials: dict[str, str],
    actor_options: dict[str, Any],
) -> serve.Application:
    """The application that the control plane deploys. Each replica has a log of its own in log_dir, on its node.

    actor_options: Ray's, which say on which nodes replicas may run.
    """
    router = parse_spec(spec).router
    deployment = serve.deployment(
        name="router",
        num_replicas=router.replicas,
        max_ongoing_requests=_MAX_REQUESTS,
        ray_actor_options={"num_cpus": 0, **actor_options},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=20,
    )(serve.ingress()(Router))
    return deployment.bind(spec, index_url, log_dir, credentials)


class Router:
    """One router replica."""

    # Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self, spec: dict[str, Any], index_url: str, log_dir: str, credentials: dict[str, str]
    ) -> None:
        name = f"router-{uuid4().hex[:8]}"
        log = f"router-{time.strftime('%Y%m%d-%H%M%S')}-{name.removeprefix('router-')}.log"  # by name is by start
        redirect_output(Path(log_dir) / log, who=name)
        parsed = parse_spec(spec)
        host = parsed.router.host or ray.util.get_node_ip_address()
        who = ProcessName.of_router(parsed.name, name)
        identity = await asyncio.to_thread(open_identity, who, tls=parsed.security.tls)
        self._service = await RouterService.open(
            parsed,
            index_url=index_url,
            credentials=Credentials.from_plain(credentials),
            identity=identity,
            host=host,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._service.http_app(proxy_sets_request_id=True)

    async def __del__(self) -> None:
        await self._service.close()
