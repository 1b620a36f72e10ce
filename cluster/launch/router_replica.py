"""The router as a Ray Serve deployment, which Serve places and restarts. Clients connect to the router directly."""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray import serve

from cluster.launch.attached_endpoints import AttachedList
from cluster.ray.controller_call import ask_controller, open_identity, open_tls_credentials
from core.identity.process_name import ProcessName
from core.process.interpreter import spare_the_old
from core.process.log import redirect_output
from core.types.errors import DeployError, ReplicaFailed
from core.types.launch import Launch
from core.types.revisions import RevisionTable
from frontend.attached_deployments import AttachedDeployment
from frontend.served_model import RouterMembership
from frontend.service import RouterService

logger = logging.getLogger(__name__)

# Time to shut down, in addition to draining requests.
_LEAVE_S = 15.0
_ATTACHED_THREADS = 4
# Serve waits this long for requests sent through it; there are none.
_LOOK_S = 0.1


def build(launch: Launch, actor_options: dict[str, Any], *, max_per_node: int | None) -> serve.Application:
    """Return the application. Each replica writes its own log in log_dir on its node.

    actor_options: Ray's options that select the nodes. max_per_node: maximum replicas per node; None: no limit.
    """
    router = launch.spec.router
    on_nodes: dict[str, Any] = {} if max_per_node is None else {"max_replicas_per_node": max_per_node}
    deployment = serve.deployment(
        name="router",
        num_replicas=router.replicas,
        ray_actor_options={"num_cpus": 0, **actor_options},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=_LOOK_S,
        # Draining and shutting down happen within this time.
        graceful_shutdown_timeout_s=router.shutdown_delay(router.host or "") + launch.spec.timeouts.drain_s + _LEAVE_S,
        **on_nodes,
    )(Router)
    return deployment.bind(launch)


class Router:
    """One router replica."""

    # Serve awaits it.
    async def __init__(self, launch: Launch) -> None:  # type: ignore[misc]
        self._service: RouterService | None = None
        spec, log_dir = launch.spec, launch.log_dir
        name = f"router-{uuid4().hex[:8]}"
        # Names that sort by start time.
        log = f"router-{time.strftime('%Y%m%d-%H%M%S')}-{name.removeprefix('router-')}.log"
        redirect_output(Path(log_dir) / log, who=name)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Every client and every replica needs a file descriptor.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        host = spec.router.host or ray.util.get_node_ip_address()
        # Outside log_dir, which is cleared by the next deployment.
        audit_log = Path(log_dir).with_name("audit_log") / Path(log).with_suffix(".jsonl")
        process_name = ProcessName.of_router(spec.name, name)
        identity = await asyncio.to_thread(open_identity, process_name, tls=spec.security.tls)
        attached_deployments = _AttachedFinder(spec.name, router=name, log=log)
        self._service = service = await RouterService.open(
            spec,
            credentials=launch.credentials,
            identity=identity,
            host=host,
            node=ray.util.get_node_ip_address(),
            audit_log=audit_log,
            keys=await asyncio.to_thread(ask_controller, spec.name, "keys"),
            revisions=await asyncio.to_thread(_revisions, spec.name),
            find_attached=attached_deployments.find,
            find_members=functools.partial(_ask, spec.name, "members"),
        )
        service.own.report_traffic(functools.partial(_ask, spec.name, "note_traffic"))
        spare_the_old()

    async def check_health(self) -> None:
        """Raise ReplicaFailed if the router is broken.

        Serve calls this every few seconds, and replaces a broken router.
        """
        if self._service and not self._service.is_live():
            raise ReplicaFailed("router background tasks are crash-looping; see its log")

    async def __del__(self) -> None:
        if self._service:
            await self._service.close()


class _AttachedFinder:
    """Finder of the deployments attached to these endpoints.

    Blocking calls run on dedicated threads, so a hanging controller can delay other attached deployments, and nothing
    else.
    """

    def __init__(self, endpoints: str, *, router: str, log: str) -> None:
        """log: file name of this router's log."""
        self._list = AttachedList(endpoints)
        self._router = router
        self._log = log
        self._threads = ThreadPoolExecutor(_ATTACHED_THREADS, "attached")

    async def find(self) -> list[AttachedDeployment]:
        """Return the attached deployments. Raises DeployError."""
        return [
            AttachedDeployment(
                spec=launch.spec, credentials=launch.credentials, enter=functools.partial(self._enter, launch)
            )
            for launch in await asyncio.to_thread(self._list.launches)
        ]

    async def _enter(self, launch: Launch) -> RouterMembership:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._obtain_identity, launch)

    def _obtain_identity(self, launch: Launch) -> RouterMembership:
        """Obtain credentials as a router of that deployment from its controller. Raises ClusterError."""
        spec = launch.spec
        tls_credentials = open_tls_credentials(ProcessName.of_router(spec.name, self._router), tls=spec.security.tls)
        return RouterMembership(
            identity=tls_credentials.identity,
            audit_log=Path(launch.log_dir).with_name("audit_log") / Path(self._log).with_suffix(".jsonl"),
            revisions=_revisions(spec.name),
            tell=functools.partial(_ask, spec.name, "note_traffic", threads=self._threads),
            find_members=functools.partial(_ask, spec.name, "members", threads=self._threads),
            leave=tls_credentials.stop,
        )


async def _ask(deployment: str, method: str, *args: Any, threads: Executor | None = None) -> Any:
    """Call a method of the deployment's controller on a thread. Raises ClusterError."""
    ask = functools.partial(ask_controller, deployment, method, *args)
    return await asyncio.get_running_loop().run_in_executor(threads, ask)


def _revisions(deployment: str) -> RevisionTable | None:
    """Return the revision table, or None if the controller's version has no updates."""
    try:
        return RevisionTable.from_json(ask_controller(deployment, "revisions"))
    except DeployError as error:
        logger.warning("cannot read revisions from the controller, using Redis only error=%s", error)
        return None
