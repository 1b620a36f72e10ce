"""Status of a deployment for `cluster status`: pools, endpoints, readiness."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NotRequired, TypedDict

from cluster.control.report import ControllerReport, Pools, RevisionReport
from cluster.launch import driver
from cluster.launch.endpoints import open_ones
from cluster.launch.router_admin import ask_routers, seen_by
from cluster.launch.state import State
from core.types.request import Role

# A restarted controller adopts its replicas first.
_ASK_S = 45.0


class Endpoints(TypedDict):
    # "host:port", or several, separated by commas.
    grpc: str
    http: str  # "http://host:port", likewise
    # "host:port" of each router, or "host:port on NODE" if there are several nodes.
    admin: list[str]


class DeploymentReport(TypedDict):
    """Content of `cluster status --json`."""

    name: str
    # Every pool has its desired replicas, and the routers see them.
    ready: bool
    endpoints: Endpoints
    # TLS between its processes: security.tls of the spec.
    tls: str
    pools: Pools
    # None if the controller's version has no updates.
    revision: NotRequired[RevisionReport | None]


def read_status(state: State, controller: Any) -> DeploymentReport:
    """Query the controller and the routers. Raises DeployError if the controller does not answer."""
    report: ControllerReport = driver.ask(controller, "status", within_s=_ASK_S)
    pools = report["pools"]
    routers = ask_routers(state, "/health") if state.admin else []
    seen = seen_by(routers)
    ready = all(pools[role]["ready"] >= pools[role]["desired"] for role in Role)
    if state.admin:
        ready = ready and seen is not None and all(seen.get(role, 0) >= pools[role]["desired"] for role in Role)
    admin = [answer.where for answer in routers]
    reachable = with_open_endpoints(state)
    endpoints: Endpoints = {"grpc": reachable.grpc, "http": reachable.http, "admin": admin}
    tls: str = report["spec"]["security"]["tls"]
    revision = report.get("revision")
    return {
        "name": state.name,
        "ready": ready,
        "endpoints": endpoints,
        "tls": tls,
        "pools": pools,
        "revision": revision,
    }


def with_open_endpoints(state: State) -> State:
    """Keep only the endpoints with a running router; keep all if none is known."""
    if "," not in state.grpc:
        return state
    from cluster.launch.router_app import router_ips

    ips = router_ips(state.endpoints or state.name)
    return replace(state, grpc=open_ones(state.grpc, ips), http=open_ones(state.http, ips))
