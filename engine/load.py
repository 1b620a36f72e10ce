"""What a process computes with, and how long a sequence can be there."""

from __future__ import annotations

import torch

from engine.runner import ModelRunner


def device_for(*, gpus: float) -> torch.device:
    """The device of this process: its first GPU where it has been given one."""
    return torch.device("cuda", 0) if gpus else torch.device("cpu")


def set_threads(cpus: float) -> None:
    """Compute threads for a share of the machine's processors; at least one."""
    torch.set_num_threads(max(1, int(cpus)))


def max_tokens_of(runner: ModelRunner, *, limit: int | None) -> int:
    """The longest sequence that this replica can hold: the model's context, its pool, or the operator's limit."""
    pool = runner.pool.num_blocks * runner.layout.block_size
    return min(runner.config.max_context, pool, limit or pool)
