"""Status of a deployment for `cluster status`, and waiting for its pools to become ready, with progress reports."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, TypedDict

from cluster.control.replica import ControllerReport, FailureReport, PoolReport, Pools, Reporter, RevisionReport
from cluster.launch import driver
from cluster.launch.endpoints import open_ones
from cluster.launch.router_admin import AdminAnswer, ask_routers, await_seen
from cluster.launch.state import State
from core.types.errors import ClusterError, DeployError, ReplicaDidNotStart
from core.types.request import Role

# A restarted controller first adopts its replicas. Until then, `status` reports that it does not answer.
_ASK_S = 15.0
_POLL_S = 0.25
_LOG_LINES = 20
# One failed round may be bad luck, such as a killed process.
_MAX_FAILED_ROUNDS = 2


class Endpoints(TypedDict):
    # "host:port", or several, separated by commas.
    grpc: str
    http: str  # "http://host:port", or several, as `grpc`
    # "host:port" of each router, or "host:port on NODE" if there are several nodes.
    admin: list[str]


class DeploymentReport(TypedDict):
    """Content of `cluster status --json`."""

    name: str
    # Every pool has its desired replicas, and the routers see them.
    ready: bool
    # A router has a replica that can answer, although something may be missing.
    serving: bool
    # What the routers lack, one line each.
    missing: list[str]
    endpoints: Endpoints
    # TLS between its processes: security.tls of the spec.
    tls: str
    pools: Pools
    revision: RevisionReport


def read_status(state: State, controller: Any) -> DeploymentReport:
    """Query the controller and the routers. Raises DeployError if the controller does not answer."""
    report: ControllerReport = driver.ask(controller, "status", within_s=_ASK_S)
    pools = report["pools"]
    routers = ask_routers(state, "/health") if state.admin else []
    missing = missing_at_routers(routers, {role.value: pools[role]["desired"] for role in Role}) if state.admin else []
    ready = not missing and all(pools[role]["ready"] >= pools[role]["desired"] for role in Role)
    admin = [answer.where for answer in routers]
    reachable = with_open_endpoints(state)
    endpoints: Endpoints = {"grpc": reachable.grpc, "http": reachable.http, "admin": admin}
    tls: str = report["spec"]["security"]["tls"]
    return {
        "name": state.name,
        "ready": ready,
        "serving": ready or any(answer.status == HTTPStatus.OK for answer in routers),
        "missing": missing,
        "endpoints": endpoints,
        "tls": tls,
        "pools": pools,
        "revision": report["revision"],
    }


def missing_at_routers(routers: Sequence[AdminAnswer], desired: Mapping[str, int]) -> list[str]:
    """Return one line for each router that sees too few replicas, from its /health response."""
    if not routers:
        return ["no router answers; see `cluster logs router`"]
    lines = []
    for router in routers:
        seen = router.replicas() or {}
        few = [f"{role} {seen.get(role, 0)}/{count}" for role, count in desired.items() if seen.get(role, 0) < count]
        if few:
            problem = router.json().get("problem")
            why = f": {problem}" if problem else "; see `cluster logs router`"
            lines.append(f"the router at {router.where} sees {' '.join(few)}{why}")
    return lines


def with_open_endpoints(state: State) -> State:
    """Keep only the endpoints with a running router; keep all if none is known."""
    if "," not in state.grpc:
        return state
    from cluster.launch.router_app import router_ips

    ips = router_ips(state.endpoints or state.name)
    return replace(state, grpc=open_ones(state.grpc, ips), http=open_ones(state.http, ips))


def await_ready(
    controller: Any, roles: Iterable[str], *, deadline: float, reporter: Reporter, known_failures: Collection[str] = ()
) -> Pools:
    """Wait until the pools of `roles` have exactly the desired replicas, all ready. Returns all pools.

    Raises ReplicaDidNotStart for a failure outside `known_failures` (replica ids), and DeployError at the deadline
    (time.monotonic()), with the replicas that are not ready.
    """
    roles = tuple(roles)
    while True:
        pools: Pools = driver.ask(controller, "status")["pools"]
        reporter.show(pools)
        if all(pools[role]["ready"] == pools[role]["desired"] == len(pools[role]["replicas"]) for role in roles):
            return pools
        for role in roles:
            if failure := _final_failure(pools[role], known_failures):
                raise ReplicaDidNotStart(failure["text"], log=_log_of(controller, failure["replica"]))
        if time.monotonic() > deadline:
            raise DeployError(f"not done in time; {_awaited(pools)}")
        time.sleep(_POLL_S)


def await_serving(controller: Any, state: State, roles: Iterable[str], **more: Any) -> Pools:
    """Like await_ready(), and wait until the routers see the replicas. more: further arguments of await_ready()."""
    roles = tuple(roles)
    pools = await_ready(controller, roles, **more)
    await_seen(state, {role: pools[role]["desired"] for role in roles})
    return pools


def _final_failure(pool: PoolReport, known: Collection[str]) -> FailureReport | None:
    for failure in (failure for failure in pool["failures"] if failure["replica"] not in known):
        if failure["will_repeat"] or pool["failed_rounds"] >= _MAX_FAILED_ROUNDS:
            return failure
    return None


def _log_of(controller: Any, replica: str) -> str:
    try:
        parts = driver.ask(controller, "logs", replica, lines=_LOG_LINES)
    except ClusterError as error:
        return f"({error})"
    return "".join(parts[rank].text for rank in sorted(parts))


def _awaited(pools: Pools) -> str:
    waiting = [
        f"{replica['id']} is {replica['state']}" + (f" ({replica['stage']})" if replica["stage"] else "")
        for pool in pools.values()
        for replica in pool["replicas"]
        if replica["state"] != "ready"
    ]
    return "; ".join(waiting) or "a failed replica waits for its next attempt"
