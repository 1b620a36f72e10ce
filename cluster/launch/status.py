"""What `cluster status` says of a deployment: its pools, its doors, and whether it is ready."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NotRequired, TypedDict

from cluster.control.report import ControllerReport, Pools, RevisionReport
from cluster.launch import driver
from cluster.launch.endpoints import open_ones
from cluster.launch.router_admin import ask_routers, seen_by
from cluster.launch.state import State
from core.types.request import Role

_ASK_S = 45.0  # a controller that has just come back first finds its replicas


class Endpoints(TypedDict):
    grpc: str  # "host:port", or several of them: "host:port,host:port"
    http: str  # "http://host:port", likewise
    admin: list[str]  # of each router, on its own node: "host:port" or, where there are several, "host:port on NODE"


class DeploymentReport(TypedDict):
    """`cluster status --json`."""

    name: str
    ready: bool  # every pool has what it should have, and the router sees it
    endpoints: Endpoints
    tls: str  # between its processes: security.tls of the spec
    pools: Pools
    revision: NotRequired[RevisionReport | None]  # None: of a controller that has no updates


def read_status(state: State, controller: Any) -> DeploymentReport:
    """Ask the controller and the routers. Raises DeployError when the controller does not answer."""
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
    """With those doors alone behind which a router runs now; with all that there may be when none is known."""
    if "," not in state.grpc:
        return state
    from cluster.launch.router_app import router_ips

    ips = router_ips(state.endpoints or state.name)
    return replace(state, grpc=open_ones(state.grpc, ips), http=open_ones(state.http, ips))
