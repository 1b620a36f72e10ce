"""What `cluster status` says of a deployment: its pools, its doors, and whether it is ready."""

from __future__ import annotations

from typing import Any

from cluster.host import driver
from cluster.host.router_health import health
from cluster.host.state import State
from cluster.words.request import Role

_ASK_S = 15.0


def read_status(state: State, controller: Any) -> dict[str, Any]:
    """Ask the controller and the router. Raises DeployError when the controller does not answer.

    `{"name", "ready", "endpoints": {"grpc", "http"}, "pools": {role: {"desired", "ready", "replicas": [{"id", "state",
    "node", "ranks": [{"pid", "device"}], "blocks": {"total", "free", "cached"}, "running", "waiting", "stage",
    "fraction"}], "failures": […]}}}`; ready means that every pool has what it should have and the router sees it.
    """
    pools = driver.ask(controller, "status", within_s=_ASK_S)["pools"]
    seen = health(state.http)
    ready = seen is not None and all(
        pools[role]["ready"] >= pools[role]["desired"] and seen[role] >= pools[role]["desired"] for role in Role
    )
    endpoints = {"grpc": state.grpc, "http": state.http}
    return {"name": state.name, "ready": ready, "endpoints": endpoints, "pools": pools}
