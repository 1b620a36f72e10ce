"""Steps of a large model with random weights: python -m tests.gpu_check.steps SHAPE [--rehearse]

A decode step is compared with its lower bound: the time to read its weights and KV once.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from benchmarks.engine.bench import BandwidthReader
from benchmarks.engine.gpu_steps import bytes_read, kernels_of_a_step
from benchmarks.engine.random_models import SHAPES, random_runner
from engine.runner.runner import ModelRunner
from engine.tools.offline import decoding_engine, prefilling_engine
from tests.gpu_check.rows import tell

_BATCHES, _CONTEXT = (1, 8, 64), 1024
_PROMPT, _CHUNK = 16384, 8192
_NUM_STEPS = 64
_SHOWN = 60  # characters of a kernel's name
_FEW = {  # for a rehearsal
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "n_routed_experts": 8,
}


def main() -> None:
    shape, *options = sys.argv[1:]
    if options:
        few = {key: value for key, value in _FEW.items() if key in SHAPES[shape]}
        where: dict[str, Any] = {"device": "cpu", "dtype": "float32", "changes": few}
        _measure(shape, (1, 2), 32, (64, 32), num_steps=2, **where)
    else:
        _measure(shape, _BATCHES, _CONTEXT, (_PROMPT, _CHUNK), num_steps=_NUM_STEPS)


def _measure(
    shape: str, batches: tuple[int, ...], context: int, prompt: tuple[int, int], *, num_steps: int, **where: Any
) -> None:
    begin = time.perf_counter()
    most = max(batches) * (context + 2 * num_steps + 16) + prompt[0]
    runner = random_runner(shape, num_blocks=most // 16, recorded_rows=max(batches), **where)
    _wait(runner)
    tell("weights made, steps recorded", time.perf_counter() - begin, "s")
    num_tokens, chunk = prompt
    seconds = min(_prompt_s(runner, num_tokens, chunk) for _ in range(2))
    tell(f"prompt of {num_tokens} in chunks of {chunk}", num_tokens / seconds, "tokens/s")
    bandwidth = BandwidthReader(runner.device)()
    for batch in batches:
        step_s = _step_s(runner, batch, context, num_steps)
        floor_s = bytes_read(runner, batch, context) / bandwidth
        tell(f"decode {batch} x {context}", step_s * 1e3, "ms")
        tell(f"decode {batch} x {context}: of the floor", floor_s / step_s, "")
        if runner.device.type == "cuda":
            for name, count, us in kernels_of_a_step(runner, batch):
                tell(f"decode {batch} x {context}: {count:g} x {name[:_SHOWN]}", us, "us")


def _prompt_s(runner: ModelRunner, num_tokens: int, chunk: int) -> float:
    engine = prefilling_engine(runner, num_tokens, max_batch_tokens=chunk)
    begin = time.perf_counter()
    for _ in range(0, num_tokens, chunk):
        engine.step()
    _wait(runner)
    return time.perf_counter() - begin


def _step_s(runner: ModelRunner, batch: int, context: int, num_steps: int) -> float:
    engine = decoding_engine(runner, runner, batch=batch, context=context)
    for _ in range(3):
        engine.step()
    _wait(runner)
    begin = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    _wait(runner)
    return (time.perf_counter() - begin) / num_steps


def _wait(runner: ModelRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


if __name__ == "__main__":
    main()
