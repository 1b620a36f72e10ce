"""Asking each router of a deployment what it tells operators alone.

By urllib: `cluster status` need not wait half a second until httpx is imported.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any

from cluster.host.state import State
from cluster.words.errors import DeployError

_ANSWER_S = 3.0
_NODE_S = 10.0
_POLL_S = 0.1
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names


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
        found: Any = json.loads(self.body)
        return found if isinstance(found, dict) else {}


def ask_routers(state: State, path: str) -> list[AdminAnswer]:
    """What each router that can be reached answers to GET `path`. On several hosts a driver must be connected."""
    if state.local_ray is not None:
        return ask_here(state.name, state.admin, path)
    from cluster.control.placement import live_nodes
    from cluster.host.driver import answers_of, this_ip
    from cluster.host.router_app import router_nodes_of

    is_named = len({node.ip for node in live_nodes()}) > 1
    nodes = router_nodes_of(state.name)
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
    found = []
    for address in addresses:
        health = _get(address, "/health")
        if health is not None and _deployment_of(health) == deployment:
            answer = health if path == "/health" else _get(address, path)
            found += [replace(answer, node=node)] if answer else []
    return found


def ask_at(address: str, path: str) -> list[AdminAnswer]:
    """As ask_routers, of whoever listens at "host:port"."""
    answer = _get(address.removeprefix("http://"), path)
    return [answer] if answer else []


def seen_by(routers: Sequence[AdminAnswer]) -> dict[str, int] | None:
    """How many replicas of each role all of them see, by their answers to /health; None when there are none."""
    seen: list[dict[str, int]] = [answer.json()["replicas"] for answer in routers]
    return {role: min(one.get(role, 0) for one in seen) for role in seen[0]} if seen else None


def await_seen(state: State, wanted: Mapping[str, int], *, within_s: float) -> None:
    """Until every router sees at least `wanted` replicas per role, as far as routers can be asked: by a certificate
    they cannot. Raises DeployError."""
    if not state.admin:
        return
    deadline = time.monotonic() + within_s
    while (seen := seen_by(ask_routers(state, "/health"))) is None or any(
        seen.get(role, 0) < count for role, count in wanted.items()
    ):
        if time.monotonic() > deadline:
            what = f"a router sees {seen} of {dict(wanted)}" if seen else "no router answers"
            raise DeployError(f"the replicas are ready, but {what} at {', '.join(state.admin)}")
        time.sleep(_POLL_S)


def _get(address: str, path: str) -> AdminAnswer | None:
    """None when nobody answers in HTTP."""
    try:
        with _DIRECT.open(f"http://{address}{path}", timeout=_ANSWER_S) as answer:
            return AdminAnswer(address, answer.status, answer.read())
    except urllib.error.HTTPError as error:  # 503: it answers, and says what it lacks
        with error:
            return AdminAnswer(address, error.code, error.read())
    except (OSError, ValueError, HTTPException):  # also of what is no address, and what is no HTTP
        return None


def _deployment_of(health: AdminAnswer) -> str | None:
    try:
        name = health.json().get("deployment")
    except ValueError:
        return None
    return name if isinstance(name, str) else None
