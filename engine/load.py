"""From a model directory to a runner that is ready, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from cluster.model import config as model_config
from engine.kv.layout import KVLayout
from engine.parallel import TensorParallel
from engine.runner import GIB, ModelRunner, layout_for, num_blocks_for

_CPU_KV_GIB = 1.0
_GPU_KV_SHARE = 0.85  # of the memory that is free beside the weights; the rest is for activations


def device_for(*, gpus: float) -> torch.device:
    """The device of this process: its first GPU where it has been given one."""
    return torch.device("cuda", 0) if gpus else torch.device("cpu")


def set_threads(cpus: float) -> None:
    """Compute threads for a share of the machine's processors; at least one."""
    torch.set_num_threads(max(1, int(cpus)))


def load_runner(
    model_dir: Path,
    *,
    dtype: str,
    weights: str = "as_stored",
    pool_dtype: str,
    block_size: int,
    kv_memory_gib: float | None,
    parallel: TensorParallel,
    expert_parallel: bool = False,
    redundant_experts: int = 0,
    is_deterministic: bool = False,
    replayed_rows: int = 0,
    device: torch.device,
    progress: Callable[[float], None],
) -> ModelRunner:
    """Load this rank's weights and set its KV pool aside. Raises SpecError."""
    layout = layout_for(
        model_dir,
        dtype=dtype,
        weights=weights,
        pool_dtype=pool_dtype,
        block_size=block_size,
        tensor_parallel=parallel.size,
    )
    if kv_memory_gib is None:
        kv_memory_gib = _CPU_KV_GIB if device.type == "cpu" else _gpu_kv_gib(model_dir, layout, dtype, device)
    return ModelRunner(
        model_dir,
        layout=layout,
        num_blocks=num_blocks_for(layout, gib=kv_memory_gib),
        dtype=getattr(torch, dtype),
        device=device,
        parallel=parallel,
        expert_parallel=expert_parallel,
        redundant_experts=redundant_experts,
        is_deterministic=is_deterministic,
        replayed_rows=replayed_rows,
        progress=progress,
    )


def max_tokens_of(runner: ModelRunner, *, limit: int | None) -> int:
    """The longest sequence that this replica can hold: the model's context, its pool, or the operator's limit."""
    pool = runner.pool.num_blocks * runner.layout.block_size
    return min(runner.config.max_context, pool, limit or pool)


def _gpu_kv_gib(model_dir: Path, layout: KVLayout, dtype: str, device: torch.device) -> float:
    """What the pool may have of a GPU whose weights are still to be loaded."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    itemsize: int = getattr(torch, dtype).itemsize
    weight_bytes = model_config.load(model_dir).num_parameters * itemsize / layout.tensor_parallel
    return (free_bytes - weight_bytes) * _GPU_KV_SHARE / GIB
