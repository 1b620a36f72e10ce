"""A function that runs once on a node of one's choice, in a process of Ray's there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def run_on(node_id: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Ray's reference to what it returns: to be awaited, or for ray.get. It fails when the node is gone."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return task.options(scheduling_strategy=there).remote(*args, **kwargs)
