"""Logs on the nodes where they were written, also of processes that are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from cluster.control.node_task import run_on
from cluster.control.placement import live_nodes, router_nodes
from cluster.process.log import LogPart, find_logs, read_log

_READ_S = 30.0  # a process may have to start on the node first


async def read_there(node_id: str, path: Path, *, lines: int, start: int | None) -> LogPart:
    """As read_log, on that node. Raises RayError or TimeoutError."""
    part: LogPart = await _call_on(node_id, read_log, path, lines=lines, start=start)
    return part


async def read_all(log_dir: str, who: str, *, lines: int, starts: dict[int, int]) -> dict[int, LogPart]:
    """Of all processes called `who`-…, on all nodes that may have routers, in the order in which they started: their
    names begin with the time. Raises RayError or TimeoutError."""
    nodes = [node.id for node in router_nodes(live_nodes())]
    found = await asyncio.gather(*(_call_on(node, find_logs, log_dir, who) for node in nodes))
    places = sorted((path.name, path, node) for node, paths in zip(nodes, found, strict=True) for path in paths)
    reads = (read_there(node, path, lines=lines, start=starts.get(i)) for i, (_, path, node) in enumerate(places))
    return dict(enumerate(await asyncio.gather(*reads)))


async def _call_on(node_id: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Its answer on that node; at once on this one."""
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args, **kwargs)
    return await asyncio.wait_for(run_on(node_id, function, *args, **kwargs), _READ_S)
