"""Logs read on the nodes where they were written, also of ended processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from cluster.control.placement import live_nodes, router_nodes, run_on
from core.process.log import LogPart, find_logs, log_path, read_log
from core.types.errors import DeployError

T = TypeVar("T")

_ROUTER = "router"
# Ray may have to start a process on the node first.
_READ_S = 30.0


async def read_rank(node_id: str, log_dir: str, replica: str, rank: int, *, lines: int, start: int | None) -> LogPart:
    """Read a rank's log on its node. Raises DeployError."""
    path = log_path(log_dir, replica, rank)
    try:
        part: LogPart = await _call_on(node_id, read_log, path, lines=lines, start=start)
        return part
    except (RayError, TimeoutError) as error:
        raise DeployError(f"{replica}: cannot read {path} on its node: {type(error).__name__}") from error


class RouterLogs:
    """Logs of all routers of a deployment, including ended ones, on all nodes that may run routers.

    Each log keeps its number while this object exists, even if nodes leave and return, so that followers can continue
    at their offsets. Owned by the controller's event loop.
    """

    def __init__(self) -> None:
        # By file name, which is unique.
        self._numbers: dict[str, int] = {}

    async def read(self, log_dir: str, *, lines: int, starts: Mapping[int, int]) -> dict[int, LogPart]:
        """Read each log, by number in start order. Unreachable nodes are skipped."""
        nodes = [node.id for node in router_nodes(live_nodes())]
        found = await asyncio.gather(
            *(_unless_unavailable(_call_on(node, find_logs, log_dir, _ROUTER)) for node in nodes)
        )
        places = {path.name: (node, path) for node, paths in zip(nodes, found, strict=True) for path in paths or ()}
        reading: dict[int, Awaitable[LogPart | None]] = {}
        # A name begins with the start time.
        for name, (node, path) in sorted(places.items()):
            number = self._numbers.setdefault(name, len(self._numbers))
            answer = _call_on(node, read_log, path, lines=lines, start=starts.get(number))
            reading[number] = _unless_unavailable(answer)
        parts = await asyncio.gather(*reading.values())
        return {number: part for number, part in zip(reading, parts, strict=True) if part}


async def _call_on(node_id: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` on that node; directly if it is this node."""
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args, **kwargs)
    async with asyncio.timeout(_READ_S):
        return await run_on(node_id, function, *args, **kwargs)


async def _unless_unavailable(answer: Awaitable[T]) -> T | None:
    try:
        return await answer
    except RayTaskError:
        # Raised by the function itself.
        raise
    except (RayError, TimeoutError):
        return None
