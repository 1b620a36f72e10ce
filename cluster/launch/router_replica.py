"""The router as a Ray Serve deployment: Serve places, watches and replaces it; its doors are its own."""

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

from cluster.control.attached_list import AttachedList
from cluster.ray.certificates import open_identity, open_tls_credentials
from cluster.ray.controller_call import ask_controller
from core.identity.process_name import ProcessName
from core.process.gc_tuning import spare_the_old
from core.process.log import redirect_output
from core.trace.traffic import TrafficAnswer, TrafficReport
from core.types.errors import DeployError, ReplicaFailed
from core.types.launch import Launch
from core.types.revisions import RevisionTable
from frontend.attached_deployments import AttachedDeployment, AttachedIdentity
from frontend.service import RouterService

logger = logging.getLogger(__name__)

_LEAVE_S = 15.0  # a router's way out, beside the requests
_ATTACHED_THREADS = 4
_LOOK_S = 0.1  # Serve waits so long for requests of its own, of which there are none


def build(launch: Launch, actor_options: dict[str, Any], *, max_per_node: int | None) -> serve.Application:
    """The application that the control plane deploys. Each replica has a log of its own in log_dir, on its node.

    actor_options: Ray's, which say on which nodes replicas may run. max_per_node: so many of them; None: all.
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
        graceful_shutdown_timeout_s=launch.spec.timeouts.drain_s + _LEAVE_S,  # for close()
        **on_nodes,
    )(Router)
    return deployment.bind(launch)


class Router:
    """One router replica."""

    # Serve awaits it.
    async def __init__(self, launch: Launch) -> None:  # type: ignore[misc]
        spec, log_dir = launch.spec, launch.log_dir
        name = f"router-{uuid4().hex[:8]}"
        log = f"router-{time.strftime('%Y%m%d-%H%M%S')}-{name.removeprefix('router-')}.log"  # by name is by start
        redirect_output(Path(log_dir) / log, who=name)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each client is one, and each replica
        host = spec.router.host or ray.util.get_node_ip_address()
        audit_log = Path(log_dir).with_name("audit_log") / Path(log).with_suffix(
            ".jsonl"
        )  # logs are cleared, this is not
        who = ProcessName.of_router(spec.name, name)
        identity = await asyncio.to_thread(open_identity, who, tls=spec.security.tls)
        attached_deployments = _AttachedFinder(spec.name, router=name, log=log)
        self._service = await RouterService.open(
            spec,
            credentials=launch.credentials,
            identity=identity,
            host=host,
            node=ray.util.get_node_ip_address(),
            audit_log=audit_log,
            keys=await asyncio.to_thread(ask_controller, spec.name, "keys"),
            revisions=await asyncio.to_thread(_revisions, spec.name),
            find_attached=attached_deployments.find,
        )
        self._service.report_traffic(functools.partial(_report_to_controller, spec.name))
        spare_the_old()

    async def check_health(self) -> None:
        """Serve asks every few seconds, and starts another replica where this raises."""
        if not self._service.is_live():
            raise ReplicaFailed("tasks of this router keep dying; its log says more")

    async def __del__(self) -> None:
        await self._service.close()


class _AttachedFinder:
    """Whose doors these are, too. What blocks is asked on a few threads of their own: a borrower whose controller hangs
    holds up other borrowers at most."""

    def __init__(self, endpoints: str, *, router: str, log: str) -> None:
        """log: the name of this router's."""
        self._list = AttachedList(endpoints)
        self._router = router
        self._log = log
        self._threads = ThreadPoolExecutor(_ATTACHED_THREADS, "borrowers")

    async def find(self) -> list[AttachedDeployment]:
        """Raises DeployError."""
        return [
            AttachedDeployment(
                spec=launch.spec, credentials=launch.credentials, enter=functools.partial(self._enter, launch)
            )
            for launch in await asyncio.to_thread(self._list.launches)
        ]

    async def _enter(self, launch: Launch) -> AttachedIdentity:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._pass, launch)

    def _pass(self, launch: Launch) -> AttachedIdentity:
        """Become a router of that deployment, too: its own controller certifies this process, which Ray has started.
        Raises ClusterError."""
        spec = launch.spec
        tls_credentials = open_tls_credentials(ProcessName.of_router(spec.name, self._router), tls=spec.security.tls)
        return AttachedIdentity(
            identity=tls_credentials.identity,
            audit_log=Path(launch.log_dir).with_name("audit_log") / Path(self._log).with_suffix(".jsonl"),
            revisions=_revisions(spec.name),
            tell=functools.partial(_report_to_controller, spec.name, threads=self._threads),
            leave=tls_credentials.stop,
        )


async def _report_to_controller(
    deployment: str, report: TrafficReport, *, threads: Executor | None = None
) -> TrafficAnswer:
    """Raises ClusterError."""
    ask = functools.partial(ask_controller, deployment, "note_traffic", report)
    answer: TrafficAnswer = await asyncio.get_running_loop().run_in_executor(threads, ask)
    return answer


def _revisions(deployment: str) -> RevisionTable | None:
    """None: the controller is of a version that has no updates."""
    try:
        return RevisionTable.from_json(ask_controller(deployment, "revisions"))
    except DeployError as error:
        logger.warning("the revisions that serve are told by Redis alone: %s", error)
        return None
