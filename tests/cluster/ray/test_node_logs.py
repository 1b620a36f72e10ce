"""Following router logs while hosts leave and return. Without Ray: a node is a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from cluster.control.placement import Node
from cluster.ray import node_logs
from cluster.ray.node_logs import RouterLogs


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Live nodes; one without a directory does not answer."""
    alive: list[str] = []

    async def run_on(node_id: str, function: Callable[..., Any], where: str | Path, *args: Any, **kwargs: Any) -> Any:
        if not (tmp_path / node_id).exists():
            raise RayError(f"{node_id} is gone")
        return function(where if isinstance(where, Path) else tmp_path / node_id, *args, **kwargs)

    monkeypatch.setattr(node_logs, "run_on", run_on)
    monkeypatch.setattr(node_logs, "live_nodes", lambda: [Node(id=id, name=id, ip=id) for id in alive])
    monkeypatch.setattr(node_logs, "router_nodes", lambda nodes: nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    return alive


async def test_router_logs_are_followed_across_node_changes(nodes: list[str], tmp_path: Path) -> None:
    def write(node: str, name: str, text: str) -> None:
        (tmp_path / node).mkdir(exist_ok=True)
        with (tmp_path / node / f"router-{name}.log").open("a") as file:
            file.write(text)

    logs, ends = RouterLogs(), dict[int, int]()

    async def read_new() -> dict[int, str]:
        parts = await logs.read("logs", lines=50, starts=ends)
        ends.update({number: part.end for number, part in parts.items()})
        return {number: part.text for number, part in parts.items() if part.text}

    nodes += ["a", "b"]
    write("a", "20261122-100000-aa", "a1\n")
    write("b", "20261122-100001-bb", "b1\n")
    assert await read_new() == {0: "a1\n", 1: "b1\n"}
    assert await read_new() == {}
    (tmp_path / "a").rename(tmp_path / "without power")
    write("b", "20261122-100001-bb", "b2\n")
    assert await read_new() == {1: "b2\n"}, "Ray holds a node that has just died to be alive"
    nodes.remove("a")
    write("b", "20261122-095959-cc", "c1\n")
    assert await read_new() == {2: "c1\n"}, "whatever its clock says"
    (tmp_path / "without power").rename(tmp_path / "a again")
    nodes.append("a again")
    write("a again", "20261122-100000-aa", "a2\n")
    assert await read_new() == {0: "a2\n"}
