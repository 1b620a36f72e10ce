"""Starting and deleting the router as a Ray Serve application."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.ray import internals
from core.types.errors import DeployError

_START_S = 120.0
_POLL_S = 0.1


def is_serve_running() -> bool:
    """Return whether Ray Serve runs in this Ray cluster, for any application."""
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def is_only_application(name: str) -> bool:
    """Return whether Ray Serve has no application but this deployment's."""
    return set(serve.status().applications) <= {name}


def start_serve() -> None:
    """Start Ray Serve without a proxy, unless it runs. Routers have their own endpoints. Raises DeployError."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        serve.start(proxy_location="Disabled")
    except (RayServeException, RayError, RuntimeError, ValueError) as error:
        raise DeployError(f"Ray Serve: {' '.join(str(error).split())}") from error


def start_router(name: str, application: serve.Application) -> None:
    """Deploy the router on a running Serve and wait until it runs. Raises DeployError with Serve's reason."""
    try:
        serve.run_many(
            [serve.RunTarget(application, name=name, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _await_running(name)
    except (RayServeException, RayError, RuntimeError, ValueError) as error:
        raise DeployError(f"router: {' '.join(str(error).split())}") from error


def router_ips(name: str) -> set[str]:
    """Return the addresses of the nodes that run a deployment's routers; empty if Serve does not know."""
    if not is_serve_running():
        return set()
    return {replica["node_ip"] for replica in _replicas(name) if replica["state"] == "RUNNING"}


def stop_router(name: str, *, owns_serve: bool) -> None:
    """Delete the application; also stop Serve if it was started for this deployment and has no other application.

    Requests in flight are cut off: Serve itself would wait for them for the full drain time.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if not is_serve_running():
        return
    if name in serve.status().applications:
        serve.delete(name, _blocking=False)
        for replica in _replicas(name):
            # The router may have ended by itself.
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(replica["actor_name"], namespace="serve"))
    if owns_serve and is_only_application(name):
        serve.shutdown()
    elif name in serve.status().applications:
        serve.delete(name)


def _replicas(name: str) -> list[dict[str, Any]]:
    """Return Serve's details of the routers of a deployment."""
    application = internals.serve_details()["applications"].get(name, {})
    return [replica for part in application.get("deployments", {}).values() for replica in part["replicas"]]


def cause_of(message: str) -> str:
    """Return the router's own error from Serve's message about a failed start; empty if there is none.

    An operator can act on such an error at once, so there is no need to wait for Serve's retries.
    """
    errors = re.findall(r"^(?:\w+\.)*core\.types\.errors\.\w+: (.+)$", message, re.MULTILINE)
    return str(errors[-1]) if errors else ""


def _await_running(name: str) -> None:
    deadline = time.monotonic() + _START_S
    while (application := serve.status().applications.get(name)) is None or application.status != "RUNNING":
        messages = [part.message for part in application.deployments.values()] if application else []
        if cause := next((cause for message in messages if (cause := cause_of(message))), ""):
            raise DeployError(f"router: {cause}")
        if application is not None and application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            last_lines = [message.strip().splitlines()[-1] for message in messages if message.strip()]
            raise DeployError(f"router: {'; '.join(last_lines) or application.message}")
        if time.monotonic() > deadline:
            state = application.status.value if application else "unknown"
            raise DeployError(f"router: not running after {_START_S:g} s ({state}); if this machine is busy, try again")
        time.sleep(_POLL_S)
