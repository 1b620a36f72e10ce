"""Decode steps of whole models of known shapes on a GPU, replayed from a graph, compared with the memory lower bound.

python -m benchmarks.engine.gpu_steps [SHAPE …]         needs only torch, triton and numpy
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch

from benchmarks.engine.kernels import copy_rate, device_seconds
from benchmarks.engine.random_models import SHAPES, random_runner
from core.model.shape import ModelConfig
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.runner.runner import ModelRunner

_BATCHES = (1, 8, 64)  # rows
_CONTEXT = 1024  # tokens of each row
_PROMPT = 2048
BLOCK_SIZE = 16
# About 30 ms, longer than the host needs to launch a step kernel by kernel.
step_seconds = partial(device_seconds, tries=10, head_start_cycles=60_000_000)


def bench_gpu_steps(shapes: Seq[str], *, pool_dtype: str = "auto") -> dict[str, Any]:
    """Measure steps of models with random weights. Returns plain JSON values.

    floor: time to read a step's bytes at the copy bandwidth measured in the same run. The bytes are KV and weights; of
    the experts, as many as random choices are expected to hit.
    """
    device = torch.device("cuda", 0)
    bytes_s = copy_rate(device)
    results = []
    for shape in shapes:
        runner = random_runner(
            shape,
            pool_dtype=pool_dtype,
            num_blocks=max(_BATCHES) * (_CONTEXT // BLOCK_SIZE + 1),
            recorded_rows=max(_BATCHES),
        )
        for num_rows in _BATCHES:
            seconds = step_seconds(partial(runner.forward, decode_batch(num_rows)))
            floor_s = bytes_read(runner, num_rows, _CONTEXT) / bytes_s
            results.append(
                {
                    "shape": shape,
                    "rows": num_rows,
                    "milliseconds": seconds * 1e3,
                    "floor_milliseconds": floor_s * 1e3,
                    "share": floor_s / seconds,
                }
            )
        prompt = Row(token_ids=[7] * _PROMPT, start=0, blocks=range(_PROMPT // BLOCK_SIZE), num_logits=1)
        batch = Batch.of([prompt], block_size=BLOCK_SIZE)
        seconds = step_seconds(partial(runner.forward, batch))
        results.append({"shape": shape, "prompt": _PROMPT, "milliseconds": seconds * 1e3})
        del runner
        gc.collect()
        torch.cuda.empty_cache()
    return {"device": torch.cuda.get_device_name(device), "copy_gb_s": bytes_s / 1e9, "steps": results}


def kernels_of_a_step(runner: ModelRunner, num_rows: int, *, max_kernels: int = 8) -> list[tuple[str, float, float]]:
    """Return (name, launches, microseconds) of the kernels in a decode step, longest first.

    The last two entries are the sum of the other kernels, and the idle time between the first and the last kernel.
    """
    batch, times = decode_batch(num_rows), 5
    for _ in range(3):
        runner.forward(batch)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            runner.forward(batch)
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    spans = []
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    rows = [(name, len(taken) / times, sum(taken) / times) for name, taken in found.items()]
    rows.sort(key=lambda row: -row[2])
    others = rows[max_kernels:]
    whole_us = (max(end for _, end in spans) - min(start for start, _ in spans)) / times
    idle_us = whole_us - sum(us for _, _, us in rows)
    return [
        *rows[:max_kernels],
        ("others", sum(count for _, count, _ in others), sum(us for *_, us in others)),
        ("nothing", 0, idle_us),
    ]


def decode_batch(num_rows: int, *, num_tokens: int = 1, context: int = _CONTEXT) -> Batch:
    """Return rows with the last `num_tokens` tokens of a context, with logits for all of them."""
    width = context // BLOCK_SIZE
    rows = [
        Row(
            token_ids=[i] * num_tokens,
            start=context - num_tokens,
            blocks=range(i * width, (i + 1) * width),
            num_logits=num_tokens,
        )
        for i in range(num_rows)
    ]
    return Batch.of(rows, block_size=BLOCK_SIZE)


def bytes_read(runner: ModelRunner, num_rows: int, context: int) -> float:
    """Return the bytes read by a step with one query per row: weights without the token table, expected experts, and
    KV."""
    config = runner.config
    weights = config.num_parameters - _idle_parameters(config, num_rows)
    if not config.tie_embeddings:
        weights -= config.vocab_size * config.hidden_size
    return weights * runner.dtype.itemsize + num_rows * context * runner.layout.bytes_per_token()


def _idle_parameters(config: ModelConfig, num_rows: int) -> float:
    if (experts := config.experts) is None:
        return 0.0
    idle: float = experts.num_experts * (1 - experts.num_per_token / experts.num_experts) ** num_rows
    return sum(layer.is_sparse for layer in config.layers) * idle * 3 * config.hidden_size * experts.intermediate_size


if __name__ == "__main__":
    print(json.dumps(bench_gpu_steps(sys.argv[1:] or [*SHAPES]), indent=1))
