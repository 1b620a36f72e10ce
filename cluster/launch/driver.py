"""This process as a driver of a Ray cluster: connecting, and speaking to a deployment's controller."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster.control import controller
from cluster.control.controller import Controller
from cluster.control.desired_state import namespace
from cluster.control.placement import Node, on_the_head
from cluster.ray import internals
from cluster.ray.cleanup import remove_remains
from cluster.ray.node_task import run_on
from core.index import embedded as embedded_index
from core.index.embedded import EmbeddedIndex
from core.index.redis_server import RedisAddress
from core.process.ports import free_port, is_free
from core.types.errors import ClusterError, DeployError

T = TypeVar("T")

_PORT = 6379  # Ray's own default
_PROBE_S = 3.0
_ELSEWHERE = " (this machine must be a node of it, and have its token; from any other: `cluster --address USER@{}`)"
_ASK_S = 60.0  # longer than a controller needs to come back after its death


def connect(address: str, name: str) -> None:
    """Join the Ray cluster at `address` ("host", "host:port" or "auto"); once. Raises DeployError if nobody answers."""
    if ray.is_initialized():
        return
    if address.startswith("ray://"):
        raise DeployError(f"{address}: give the address of Ray's control store, HOST:6379, from one of Ray's own nodes")
    if "@" in address:
        raise DeployError(f"{address}: write `cluster --address {address} ...`: before the command, it runs over SSH")
    if address != "auto":
        address = address if ":" in address else f"{address}:{_PORT}"
        _probe(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    internals.keep_off_stdout()
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")  # one try of 45 s; by default there are twenty
    try:
        ray.init(
            address=address,
            namespace=namespace(name),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        there = "" if address == "auto" else _ELSEWHERE.format(address.rpartition(":")[0])
        raise DeployError(f"Ray at {address}: {' '.join(str(error).split())}{there}") from error


def start_controller(name: str) -> Any:
    """Start the deployment's controller, which outlives this driver; returns its handle, for ask().

    On the head, and nowhere else while that is away, without which Ray cannot do anyway: there are the files of the
    deployment's keys and of an operator's authority. Elsewhere it would save keys where nobody looks for them, and
    revoked ones would be back with the next deployment.
    """
    make: Any = ray.remote(Controller)
    return make.options(**_detached(name, controller.ACTOR_NAME), **on_the_head(), max_task_retries=3).remote(name)


def find_controller(name: str) -> Any | None:
    """The controller of a deployment; None when there is none in this Ray cluster."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(controller.ACTOR_NAME, namespace=namespace(name))
    return None


def start_index(name: str, log_dir: str, head: Node | None = None) -> str:
    """Start the deployment's own Redis, and return its URL when it answers.

    On this machine's loopback; or on the head, at its address in the cluster, and there again when the head is back.
    """
    if head is None:
        address, options = RedisAddress(free_port()), {}
    else:
        [port] = run_on_each([head], free_port, head.ip)
        address, options = RedisAddress(port, host=head.ip), on_the_head()
    make: Any = ray.remote(EmbeddedIndex)
    ask(make.options(**_detached(name, embedded_index.ACTOR_NAME), **options).remote(address, log_dir), "ready")
    return address.url


def run_on_each(nodes: Sequence[Node], function: Callable[..., T], *args: Any) -> list[T]:
    """Call it once on each of these nodes, at the same time. Raises DeployError."""
    try:
        answers: list[T] = ray.get([run_on(node.id, function, *args) for node in nodes], timeout=_ASK_S)
    except RayError as error:
        raise DeployError(f"{function.__name__}: {' '.join(str(error).split())}") from error
    return answers


def answers_of(nodes: Sequence[Node], function: Callable[..., T], *args: Any, within_s: float) -> list[T]:
    """As run_on_each, of those nodes that answer: one that has just died may count as alive for a moment."""
    asked = [run_on(node.id, function, *args) for node in nodes]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=within_s)
    answers: list[T] = []
    for reference in answered:
        with contextlib.suppress(RayError):
            answers.append(ray.get(reference))
    return answers


def is_of_ray_up() -> bool:
    """Whether the Ray of this machine was started by `ray up`: what is one machine now will soon be several."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"\0--autoscaling-config=" in file.read_bytes():  # of its autoscaler
                return True
    return False


def is_endpoint_free(host: str | None, port: int) -> bool:
    """On a node of the cluster: whether a router could listen there, by default at the node's own address."""
    return is_free(host or this_ip(), port)


def this_ip() -> str:
    """The address of this machine in the cluster."""
    ip: str = ray.util.get_node_ip_address()
    return ip


def remove_by_force(name: str) -> None:
    """The controller, which does not do it, and what is left then. Raises RayError."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(controller.ACTOR_NAME, namespace=namespace(name)))
    remove_remains(name)


def stop_index(name: str) -> None:
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(embedded_index.ACTOR_NAME, namespace=namespace(name)))


def ask(actor: Any, method: str, *args: Any, within_s: float = _ASK_S, **kwargs: Any) -> Any:
    """Call a method of an actor and wait. Raises the actor's own ClusterError, or DeployError for anything else."""
    try:
        return ray.get(getattr(actor, method).remote(*args, **kwargs), timeout=within_s)
    except RayTaskError as error:
        if isinstance(error.cause, ClusterError):
            raise error.cause from None
        raise DeployError(f"{method}: {type(error.cause).__name__}: {' '.join(str(error.cause).split())}") from error
    except GetTimeoutError:
        raise DeployError(f"{method}: no answer within {within_s:g} s") from None
    except RayActorError as error:
        raise DeployError(f"{method}: {' '.join(str(error).split())}") from error


def _detached(name: str, actor: str) -> dict[str, Any]:
    """Outlives this driver, comes back when it dies, and takes nobody's place. One that is there already is taken."""
    return {
        "name": actor,
        "namespace": namespace(name),
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
    }


def _probe(address: str) -> None:
    """Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
    except (OSError, ValueError) as error:
        raise DeployError(f"no Ray answers at {address} ({error})") from None
