"""Ray driver: connect to a Ray cluster and call a deployment's controller."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from cluster.control.controller import Controller, remove_remains
from cluster.control.placement import Node, on_the_head, run_on
from cluster.ray import internals
from cluster.ray.controller_call import ASK_S, ask, find_controller
from cluster.ray.store import CONTROLLER, namespace
from core.index import embedded as embedded_index
from core.index.embedded import EmbeddedIndex
from core.index.redis_server import RedisAddress
from core.process import processes
from core.process.ports import free_port, is_free
from core.process.processes import ENDINGS
from core.types.errors import DeployError
from core.types.network import format_address, split_address

__all__ = ["ask", "find_controller"]

T = TypeVar("T")

_PORT = 6379  # Ray's default
_PROBE_S = 3.0
_JOIN_S = 15.0
# Name of the thread that joins Ray. While it hangs, a process has to end without waiting for it.
JOINING = "joining Ray"
_ELSEWHERE = " (this machine must be one of its nodes and have its token; elsewhere, use `cluster --address USER@{}`)"


def connect(address: str, name: str, *, within_s: float = _JOIN_S) -> None:
    """Join the Ray cluster at `address` ("host", "host:port" or "auto"). No-op if this process has joined a cluster.

    Raises DeployError if it does not answer. The thread that joins may stay then; see JOINING.
    """
    if ray.is_initialized():
        return
    if address.startswith("ray://"):
        raise DeployError(f"{address}: give the address of Ray's control store, HOST:6379, on one of Ray's nodes")
    if "@" in address:
        raise DeployError(f"{address}: an SSH address goes before the command: `cluster --address {address} ...`")
    if address != "auto":
        is_bare_ipv6 = address.count(":") > 1 and not address.startswith("[")
        if is_bare_ipv6 or ":" not in address.rpartition("]")[2]:
            address = format_address(address, _PORT)
        _probe(address)
    _reject_stopped_raylet(address)
    logging.getLogger("ray").setLevel(logging.ERROR)
    internals.keep_off_stdout()
    # Make one attempt of 45 s; Ray's default is twenty attempts.
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
    # Ray replaces the handlers; its own prints a C++ stack.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDINGS)}
    joined: Future[None] = Future()
    arguments = {"namespace": namespace(name), "log_to_driver": False, "logging_level": logging.ERROR}
    threading.Thread(target=_join, args=(joined, address, arguments), name=JOINING, daemon=True).start()
    try:
        joined.result(within_s)
    except TimeoutError:
        raise DeployError(
            f"Ray at {address} does not answer within {within_s:g} s: its control store or the raylet of this host is "
            "overloaded or stands still; running replicas and routers keep serving"
        ) from None
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        there = "" if address == "auto" else _ELSEWHERE.format(address.rpartition(":")[0])
        raise DeployError(f"Ray at {address}: {' '.join(str(error).split())}{there}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _join(joined: Future[None], address: str, arguments: dict[str, Any]) -> None:
    try:
        ray.init(address=address, **arguments)
    except BaseException as error:  # the caller gets it through the future
        joined.set_exception(error)
    else:
        joined.set_result(None)


def start_controller(name: str) -> Any:
    """Start the deployment's detached controller, or find the running one. Returns its handle, for ask().

    It runs on the head only, where the files with API keys and an operator's authority are. Anywhere else it would save
    keys that the next deployment does not find, and revoked keys would become valid again.
    """
    make: Any = ray.remote(Controller)
    return make.options(**_detached(name, CONTROLLER), **on_the_head(), max_task_retries=3).remote(name)


def start_index(name: str, log_dir: str, head: Node | None = None) -> str:
    """Start the deployment's own Redis and return its URL once it answers.

    It listens on this machine's loopback, or, with `head`, on the head's cluster address, and restarts there.
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
    """Run `function` on each node in parallel. Raises DeployError."""
    try:
        answers: list[T] = ray.get([run_on(node.id, function, *args) for node in nodes], timeout=ASK_S)
    except RayError as error:
        raise DeployError(f"{function.__name__}: {' '.join(str(error).split())}") from error
    return answers


def answers_of(nodes: Sequence[Node], function: Callable[..., T], *args: Any, within_s: float) -> list[T]:
    """Run `function` on each node, and return the results of those that answer: a node may just have died."""
    references = [run_on(node.id, function, *args) for node in nodes]
    done, _ = ray.wait(references, num_returns=len(references), timeout=within_s)
    answers: list[T] = []
    for reference in done:
        with contextlib.suppress(RayError):
            answers.append(ray.get(reference))
    return answers


def is_of_ray_up() -> bool:
    """Return whether this machine's Ray was started by `ray up`, so that more nodes will join."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            # Command line of its autoscaler.
            if b"\0--autoscaling-config=" in file.read_bytes():
                return True
    return False


def is_endpoint_free(host: str | None, port: int) -> bool:
    """Return whether a router could listen at `host`. Runs on a node. host=None: the node's address."""
    return is_free(host or this_ip(), port)


def this_ip() -> str:
    """Return the cluster address of this machine."""
    ip: str = ray.util.get_node_ip_address()
    return ip


def remove_by_force(name: str) -> None:
    """Kill the controller and remove what is left of the deployment. Raises RayError."""
    _kill(name, CONTROLLER)
    remove_remains(name)


def stop_index(name: str) -> None:
    _kill(name, embedded_index.ACTOR_NAME)


def _kill(name: str, actor: str) -> None:
    with contextlib.suppress(ValueError):  # it does not run
        ray.kill(ray.get_actor(actor, namespace=namespace(name)))


def _detached(name: str, actor: str) -> dict[str, Any]:
    """Return Ray's options for a named actor that outlives this driver, restarts, and is reused if it exists."""
    return {
        "name": actor,
        "namespace": namespace(name),
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
    }


def _reject_stopped_raylet(address: str) -> None:
    """Raise DeployError if this host's raylet is stopped: ray.init would block for 30 s and then end the process."""
    of_this_ray = "" if address == "auto" else f"--gcs-address={address}"
    for pid in processes.stopped():
        if "/raylet " in (title := processes.title(pid)) and of_this_ray in title:
            raise DeployError(
                f"Ray at {address}: the raylet of this host is stopped; continue it with `kill -CONT {pid}`; running "
                "replicas and routers keep serving"
            )


def _probe(address: str) -> None:
    """Check that the port accepts connections; Ray would retry for minutes."""
    try:
        socket.create_connection(split_address(address), _PROBE_S).close()
    except (OSError, ValueError) as error:
        raise DeployError(f"no Ray answers at {address} ({error})") from None
