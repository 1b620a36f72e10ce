"""Asking each router of a deployment what it tells operators alone.

Any user of a router's host may listen at a port that routers could have, and answer what he likes: whoever does not
answer as a router of this deployment would is passed over, and nobody is waited for, or listened to, without end.

By http.client: `cluster status` need not wait half a second until httpx is imported.
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

_ANSWER_S = 3.0  # for all of it
_NODE_S = 15.0  # two answers, each to connect to and to read
_POLL_S = 0.1
_SEE_ALL_S = 60.0  # from every replica being ready until the routers have heard of all
_MAX_HEALTH_BYTES = 1 << 20
_MAX_BYTES = 64 << 20  # far more than any answer has
_MAX_AT_ONCE = 32


@dataclass(frozen=True)
class AdminAnswer:
    """What one router answers at the port that it has for operators."""

    address: str  # "host:port", on the router's node
    status: int  # of HTTP
    body: bytes
    node: str = ""  # its name, where there are several

    @property
    def where(self) -> str:
        return f"{self.address} on {self.node}" if self.node else self.address

    def json(self) -> dict[str, Any]:
        """Empty where it is something else than one object."""
        try:
            found: Any = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def replicas(self) -> dict[str, int] | None:
        """Usable ones by role, of an answer to /health; None where it is no such answer."""
        told = self.json().get("replicas")
        is_count = isinstance(told, dict) and all(type(count) is int and count >= 0 for count in told.values())
        return told if is_count else None


def ask_routers(state: State, path: str) -> list[AdminAnswer]:
    """What each router that can be reached answers to GET `path`. On several hosts a driver must be connected."""
    if state.joined_ray is not None:
        return ask_here(state.name, state.admin, path)
    from cluster.control.placement import live_nodes
    from cluster.launch.driver import answers_of, this_ip
    from cluster.launch.router_app import router_nodes_of

    is_named = len({node.ip for node in live_nodes()}) > 1
    nodes = router_nodes_of(state.endpoints or state.name)
    here = [node for node in nodes if node.ip == this_ip()]
    there = [node for node in nodes if node not in here]
    asked = (state.name, state.admin, path, is_named)
    answers = ask_here(*asked) if here else []
    for found in answers_of(there, ask_here, *asked, within_s=_NODE_S) if there else []:
        answers += found
    return sorted(answers, key=lambda answer: answer.where)  # the same, whoever asks


def ask_here(deployment: str, addresses: Sequence[str], path: str, is_named: bool = False) -> list[AdminAnswer]:
    """As ask_routers, of the routers on this machine: whatever else listens at one of `addresses` is passed over.
    is_named: answers say the name of this machine."""
    node = socket.gethostname() if is_named else ""
    with ThreadPoolExecutor(_MAX_AT_ONCE) as threads:  # those that stall keep nobody from being heard
        answers = threads.map(partial(_ask_router, deployment, path), addresses)
        return [replace(answer, node=node) for answer in answers if answer]


def ask_at(address: str, path: str) -> list[AdminAnswer]:
    """As ask_routers, of whoever listens at "host:port"."""
    answer = _get(address.removeprefix("http://"), path)
    return [answer] if answer else []


def seen_by(routers: Sequence[AdminAnswer]) -> dict[str, int] | None:
    """How many replicas of each role all of them see, by their answers to /health; None when there are none."""
    seen = [replicas for answer in routers if (replicas := answer.replicas()) is not None]
    return {role: min(one.get(role, 0) for one in seen) for role in seen[0]} if seen else None


def await_seen(state: State, wanted: Mapping[str, int], *, num_routers: int = 1, within_s: float = _SEE_ALL_S) -> None:
    """Wait until every router sees at least `wanted` replicas per role.

    num_routers: the least number of routers that must answer. Raises DeployError.
    """
    if not state.admin:
        return
    deadline = time.monotonic() + within_s
    while True:
        answers = ask_routers(state, "/health")
        seen = seen_by(answers)
        is_seen = seen is not None and all(seen.get(role, 0) >= count for role, count in wanted.items())
        if is_seen and len(answers) >= num_routers:
            return
        if time.monotonic() > deadline:
            what = f"a router sees {seen} of {dict(wanted)}" if seen else "no router answers"
            raise DeployError(f"the replicas are ready, but {what} at {', '.join(state.admin)}")
        time.sleep(_POLL_S)


def _ask_router(deployment: str, path: str, address: str) -> AdminAnswer | None:
    """None unless a router of this deployment answers there."""
    health = _get(address, "/health", max_bytes=_MAX_HEALTH_BYTES)
    if health is None or health.json().get("deployment") != deployment or health.replicas() is None:
        return None
    return health if path == "/health" else _get(address, path)


def _get(address: str, path: str, *, max_bytes: int = _MAX_BYTES) -> AdminAnswer | None:
    """None when nobody answers in HTTP, in time and in so many bytes; no proxy is asked, whatever the environment
    names, and nobody is followed elsewhere."""
    is_late = threading.Event()
    try:
        with closing(HTTPConnection(address, timeout=_ANSWER_S)) as connection:
            connection.connect()
            # A timeout of the socket's is of each read: who sends a byte now and then would never run into it.
            end = threading.Timer(_ANSWER_S, _hang_up, [connection.sock, is_late])
            end.start()
            try:
                connection.request("GET", path)
                answer = connection.getresponse()  # 503: it answers, and says what it lacks
                body = answer.read(max_bytes + 1)
            finally:
                end.cancel()
                end.join()
    except (OSError, ValueError, HTTPException):  # also of what is no address, and what is no HTTP
        return None
    return None if is_late.is_set() or len(body) > max_bytes else AdminAnswer(address, answer.status, body)


def _hang_up(connection: socket.socket, is_late: threading.Event) -> None:
    is_late.set()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
