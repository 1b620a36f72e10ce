"""Decode steps of whole models of known shapes on a GPU, replayed from a graph, beside what their bytes would take.

python -m engine.tools.bench_gpu_steps llama-8b qwen3-30b-a3b …         where only torch, triton and numpy are installed
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np
import torch

from cluster.model.shape import ModelConfig
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.runner import ModelRunner
from engine.tools.random_models import SHAPES, random_runner

_BATCHES = (1, 8, 64)  # rows
_CONTEXT = 1024  # tokens of each
_PROMPT = 2048
_BLOCK_SIZE = 16
_TRIES = 10
_HEAD_START_CYCLES = 60_000_000  # some 30 ms: longer than the host takes to launch a step kernel by kernel


def bench_gpu_steps(shapes: Seq[str], *, pool_dtype: str = "auto") -> dict[str, Any]:
    """Measure steps of models with random weights; returns plain JSON values.

    floor: the bytes that a step reads (weights of all matrices, of experts those that so many random choices hit, and
    KV), over the copy bandwidth measured in the same run.
    """
    device = torch.device("cuda", 0)
    bytes_s = _copy_rate(device)
    results = []
    for shape in shapes:
        runner = random_runner(
            shape,
            pool_dtype=pool_dtype,
            num_blocks=max(_BATCHES) * (_CONTEXT // _BLOCK_SIZE + 1),
            recorded_rows=max(_BATCHES),
        )
        for num_rows in _BATCHES:
            seconds = _seconds(partial(runner.forward, _decode(num_rows)))
            floor_s = _bytes_read(runner, num_rows) / bytes_s
            results.append(
                {
                    "shape": shape,
                    "rows": num_rows,
                    "milliseconds": seconds * 1e3,
                    "floor_milliseconds": floor_s * 1e3,
                    "share": floor_s / seconds,
                }
            )
        prompt = Row(token_ids=[7] * _PROMPT, start=0, blocks=range(_PROMPT // _BLOCK_SIZE), num_logits=1)
        batch = Batch.of([prompt], block_size=_BLOCK_SIZE)
        seconds = _seconds(partial(runner.forward, batch))
        results.append({"shape": shape, "prompt": _PROMPT, "milliseconds": seconds * 1e3})
        del runner
        gc.collect()
        torch.cuda.empty_cache()
    return {"device": torch.cuda.get_device_name(device), "copy_gb_s": bytes_s / 1e9, "steps": results}


def _copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written."""
    source, target = torch.empty(2, 1 << 31, dtype=torch.uint8, device=device)
    return 2 * len(source) / _seconds(lambda: target.copy_(source))


def _decode(num_rows: int) -> Batch:
    width = _CONTEXT // _BLOCK_SIZE
    rows = [
        Row(token_ids=[i], start=_CONTEXT - 1, blocks=range(i * width, (i + 1) * width), num_logits=1)
        for i in range(num_rows)
    ]
    return Batch.of(rows, block_size=_BLOCK_SIZE)


def _bytes_read(runner: ModelRunner, num_rows: int) -> float:
    config = runner.config
    weights = (
        1.0 * config.num_parameters - config.vocab_size * config.hidden_size
    )  # of the embedding a few rows are read
    weights -= _idle_experts(config, num_rows)
    return weights * runner.dtype.itemsize + num_rows * _CONTEXT * runner.layout.block_bytes / _BLOCK_SIZE


def _idle_experts(config: ModelConfig, num_rows: int) -> float:
    """Weights of the experts that nobody chooses, if every choice is as likely as any other."""
    if (experts := config.experts) is None:
        return 0.0
    idle: float = experts.num_experts * (1 - experts.num_per_token / experts.num_experts) ** num_rows
    return sum(experts.is_sparse) * idle * 3 * config.hidden_size * experts.intermediate_size


def _seconds(run: Callable[[], object]) -> float:
    """The median of the device's time for several runs, after some that compile and warm up; see bench_kernels."""
    for _ in range(3):
        run()
    times = []
    for _ in range(_TRIES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(times))


if __name__ == "__main__":
    print(json.dumps(bench_gpu_steps(sys.argv[1:] or list(SHAPES)), indent=1))
