"""Single calls on a chosen node, in a Ray process there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def run_on(node_id: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start `function` on the node. Returns a Ray reference to its result, which fails if the node is lost."""
    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return task.options(scheduling_strategy=there).remote(*args, **kwargs)
