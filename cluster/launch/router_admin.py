"""HTTP client for the admin ports of a deployment's routers.

Any user of a router's host could listen on a port that routers may use and answer anything. So answers that do not come
from a router of this deployment are ignored, and time and size are limited.

Uses http.client: importing httpx would delay `cluster status` by half a second.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Any

from cluster.launch.state import State
from core.types.errors import DeployError

# Deadline for one request.
_ANSWER_S = 3.0
# Two requests, each with connect and read.
_NODE_S = 15.0
_POLL_S = 0.1
# Limit of the time from all replicas being ready until every router sees them.
_SEE_ALL_S = 60.0
_MAX_HEALTH_BYTES = 1 << 20
_MAX_BYTES = 64 << 20  # far more than any answer has
_MAX_AT_ONCE = 32


@dataclass(frozen=True)
class AdminAnswer:
    """Response of one router on its admin port."""

    # "host:port", on the router's node.
    address: str
    status: int  # HTTP status
    body: bytes
    # Node name, if there are several nodes.
    node: str = ""

    @property
    def where(self) -> str:
        return f"{self.address} on {self.node}" if self.node else self.address

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object; empty if it is anything else."""
        try:
            found: Any = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def replicas(self) -> dict[str, int] | None:
        """Return the usable replicas by role from a /health response, or None if it is not one."""
        counts = self.json().get("replicas")
        is_count = isinstance(counts, dict) and all(type(count) is int and count >= 0 for count in counts.values())
        return counts if is_count else None


def ask_routers(state: State, path: str) -> list[AdminAnswer]:
    """GET `path` from each reachable router. With several hosts, a driver must be connected."""
    if state.joined_ray is not None:
        return ask_here(state.name, state.admin, path)
    from cluster.control.placement import live_nodes
    from cluster.launch.driver import answers_of, this_ip
    from cluster.launch.router_app import router_ips

    nodes, ips, here = live_nodes(), router_ips(state.endpoints or state.name), this_ip()
    arguments = (state.name, state.admin, path, len({node.ip for node in nodes}) > 1)
    answers = ask_here(*arguments) if here in ips else []
    there = [node for node in nodes if node.ip in ips and node.ip != here]
    for found in answers_of(there, ask_here, *arguments, within_s=_NODE_S) if there else []:
        answers += found
    # Sorted, so that the order does not depend on the asking host.
    return sorted(answers, key=lambda answer: answer.where)


def ask_here(deployment: str, addresses: Sequence[str], path: str, is_named: bool = False) -> list[AdminAnswer]:
    """Like ask_routers, for routers on this machine; other listeners at `addresses` are ignored. is_named: add the host
    name."""
    node = socket.gethostname() if is_named else ""
    # Enough threads that stalling listeners do not delay the rest.
    with ThreadPoolExecutor(_MAX_AT_ONCE) as threads:
        answers = threads.map(partial(_ask_router, deployment, path), addresses)
        return [replace(answer, node=node) for answer in answers if answer]


def ask_at(address: str, path: str) -> list[AdminAnswer]:
    """Like ask_routers, for one listener at "host:port", which is not verified."""
    answer = _get(address.removeprefix("http://"), path)
    return [answer] if answer else []


def seen_by(routers: Sequence[AdminAnswer]) -> dict[str, int] | None:
    """Return how many replicas of each role every router sees, from /health responses; None without responses."""
    seen = [replicas for answer in routers if (replicas := answer.replicas()) is not None]
    return {role: min(one.get(role, 0) for one in seen) for role in seen[0]} if seen else None


def await_seen(
    state: State, min_counts: Mapping[str, int], *, num_routers: int = 1, within_s: float = _SEE_ALL_S
) -> None:
    """Wait until every router sees at least `min_counts` replicas per role.

    num_routers: minimum number of routers that must respond. Raises DeployError.
    """
    if not state.admin:
        return
    deadline = time.monotonic() + within_s
    while True:
        answers = ask_routers(state, "/health")
        seen = seen_by(answers)
        is_seen = seen is not None and all(seen.get(role, 0) >= count for role, count in min_counts.items())
        if is_seen and len(answers) >= num_routers:
            return
        if time.monotonic() > deadline:
            problem = f"a router sees {seen} of {dict(min_counts)}" if seen else "no router answers"
            reasons = {str(answer.json().get("problem") or "") for answer in answers} - {""}
            why = f" ({'; '.join(sorted(reasons))})" if reasons else ""
            raise DeployError(f"the replicas are ready, but {problem} at {', '.join(state.admin)}{why}")
        time.sleep(_POLL_S)


def _ask_router(deployment: str, path: str, address: str) -> AdminAnswer | None:
    """Return the response, or None if the listener is not a router of this deployment."""
    health = _get(address, "/health", max_bytes=_MAX_HEALTH_BYTES)
    if health is None or health.json().get("deployment") != deployment or health.replicas() is None:
        return None
    return health if path == "/health" else _get(address, path)


def _get(address: str, path: str, *, max_bytes: int = _MAX_BYTES) -> AdminAnswer | None:
    """GET without proxies or redirects. Returns None on errors, on timeout, or if the body exceeds `max_bytes`."""
    is_late = threading.Event()
    try:
        with closing(HTTPConnection(address, timeout=_ANSWER_S)) as connection:
            connection.connect()
            # A socket timeout limits each read only: a server that sends a byte now and then would never hit it.
            end = threading.Timer(_ANSWER_S, _hang_up, [connection.sock, is_late])
            end.start()
            try:
                connection.request("GET", path)
                # 503 is a response as well: the router reports what is missing.
                answer = connection.getresponse()
                body = answer.read(max_bytes + 1)
            finally:
                end.cancel()
                end.join()
    except (OSError, ValueError, HTTPException):
        # Includes invalid addresses and non-HTTP servers.
        return None
    return None if is_late.is_set() or len(body) > max_bytes else AdminAnswer(address, answer.status, body)


def _hang_up(connection: socket.socket, is_late: threading.Event) -> None:
    is_late.set()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
