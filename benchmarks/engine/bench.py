"""Engine benchmark in one process: tokens per second of decode steps and prompts, compared with memory bandwidth.

`bandwidth_share` of a decode step is the time to read every weight once at memory bandwidth, divided by the step time.
Bandwidth varies on shared machines, so it is measured before and after each try, in pages of 2 MiB; the share is the
median over the tries.

Random token ids, greedy, no end of sequence, no prefix cache, best of three. A decode step includes the work around the
model: building the batch, sampling, sequence bookkeeping.

On a GPU, decode steps are replayed (engine/runner/decode_graphs.py); `plain_step_ms` is the step launched kernel by
kernel. On a CPU, `ways` lists the time in ms of each implementation of a product or of attention on one thread, and the
chosen one: see engine/cpu/autotune.py.

    python -m benchmarks engine --json
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from core.types.errors import SpecError
from engine.config import EngineConfig
from engine.cpu.huge_pages import advise
from engine.cpu.library import instruction_sets, open_kernels
from engine.runner.runner import ModelRunner
from engine.scheduler.step import Runner, ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.tools.offline import MOST_STEPS, decoding_engine, prefilling_engine
from engine.weights.open_checkpoint import is_quantized

_NUM_STEPS = MOST_STEPS  # of one decode measurement
_NUM_TRIES = 3  # the best counts
# Prompt tokens per step, as in a prefill replica.
_CHUNK = 2048
_BLOCK_SIZE = 16
_READ_S = 0.2
# Far larger than any cache.
_READ_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}


def bench_engine(
    model_dir: Path,
    *,
    dtype: str,
    weights: str,
    pool_dtype: str,
    batches: Seq[int],
    contexts: Seq[int],
    prefills: Seq[int],
    threads: int | None,
    device: torch.device,
) -> dict[str, Any]:
    """Measure, and return plain JSON values. threads: CPU threads; None: all processors. Raises SpecError."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError("python -m benchmarks engine: this machine has no CUDA device that torch can use")
    if threads is not None:
        torch.set_num_threads(threads)
    max_blocks = max(
        (n * -(-(tokens + extra) // _BLOCK_SIZE) for n, tokens, extra in _needs(batches, contexts, prefills)), default=1
    )
    config = EngineConfig(
        model_dir=model_dir,
        dtype=dtype,
        weights=weights,
        pool_dtype=pool_dtype,
        block_size=_BLOCK_SIZE,
        num_blocks=max_blocks + 1,
        recorded_rows=max(batches, default=0),
        device=str(device),
    )
    runner = ModelRunner(config)
    read_bandwidth = BandwidthReader(device)
    num_bytes = _weight_bytes(runner, model_dir, weights)
    decodes = [
        _decode(runner, batch, context, num_bytes, read_bandwidth) for context, batch in product(contexts, batches)
    ]
    return {
        "decode": decodes,
        "prefill": [_prefill(runner, num_tokens) for num_tokens in prefills],
        "bandwidth_gb_s": round(read_bandwidth() / 1e9, 2),
        "model": model_dir.name,
        "dtype": dtype,
        "weights": weights,
        "pool_dtype": runner.layout.dtype,
        "threads": torch.get_num_threads(),
        "instructions": " ".join(instruction_sets()),
        "computed_by": _computed_by(runner),
        "ways": runner.ways,
    }


def _computed_by(runner: ModelRunner) -> str:
    """Return "kernels", or "torch" if there are no kernels for this processor, which is slower."""
    has_kernels = runner.device.type != "cpu" or open_kernels(dtype=runner.dtype, device=runner.device) is not None
    return "kernels" if has_kernels else "torch"


class BandwidthReader:
    """Reader of memory far larger than any cache; on a CPU with this process's compute threads."""

    def __init__(self, device: torch.device) -> None:
        self._data = torch.empty(_READ_BYTES[device.type] // 4, device=device)
        if device.type == "cpu":
            advise(self._data)
        self._data.fill_(1)

    def __call__(self) -> float:
        """Return bytes per second."""
        begin, times = time.perf_counter(), 0
        while time.perf_counter() < begin + _READ_S:
            self._data.sum().item()
            times += 1
        return times * self._data.nbytes / (time.perf_counter() - begin)


def _weight_bytes(runner: ModelRunner, model_dir: Path, weights: str) -> int | None:
    """Return the weight bytes that a step reads; None if they depend on the rows or on the checkpoint's format."""
    config = runner.config
    if config.experts is not None or (weights == "auto" and is_quantized(model_dir)):
        return None
    num_read = config.num_parameters
    if not config.tie_embeddings:
        num_read -= config.vocab_size * config.hidden_size
    return num_read * (1 if weights == "int8" else runner.dtype.itemsize)


def _needs(batches: Seq[int], contexts: Seq[int], prefills: Seq[int]) -> Iterable[tuple[int, int, int]]:
    """Yield (sequences, tokens of each, tokens added to each)."""
    yield from ((batch, context, _NUM_STEPS + 1) for batch, context in product(batches, contexts))
    yield from ((1, num_tokens, 1) for num_tokens in prefills)


def _decode(
    runner: ModelRunner, batch: int, context: int, num_bytes: int | None, read_bandwidth: Callable[[], float]
) -> dict[str, Any]:
    """Measure decode steps. num_bytes: weight bytes read per step, or None if unknown."""

    def run(model: Runner[Tensor]) -> float:
        engine = decoding_engine(runner, model, batch=batch, context=context)
        engine.step()
        return _timed(lambda: [engine.step() for _ in range(_NUM_STEPS)])

    tries, bandwidths = [], [read_bandwidth()]
    for _ in range(_NUM_TRIES):
        tries.append(run(runner))
        bandwidths.append(read_bandwidth())
    seconds = min(tries)
    row: dict[str, Any] = {
        "batch": batch,
        "context": context,
        "tokens_per_s": round(batch * _NUM_STEPS / seconds, 1),
        "step_ms": round(seconds / _NUM_STEPS * 1e3, 3),
        "bandwidth_share": None,
    }
    if num_bytes is not None:
        read_s = [2 * num_bytes / (before + after) for before, after in pairwise(bandwidths)]
        shares = [_NUM_STEPS * read / took for read, took in zip(read_s, tries, strict=True)]
        row["bandwidth_share"] = round(median(shares), 3)
    if runner.device.type == "cuda":
        plain_s = min(run(_Plain(runner)) for _ in range(_NUM_TRIES))
        row["plain_step_ms"] = round(plain_s / _NUM_STEPS * 1e3, 3)
    return row


def _prefill(runner: ModelRunner, num_tokens: int) -> dict[str, Any]:
    def run() -> float:
        engine = prefilling_engine(runner, num_tokens, max_batch_tokens=_CHUNK)
        return _timed(lambda: [engine.step() for _ in range(0, num_tokens, _CHUNK)])

    # Touch all memory once before timing.
    run()
    seconds = min(run() for _ in range(_NUM_TRIES))
    return {"tokens": num_tokens, "tokens_per_s": round(num_tokens / seconds, 1)}


class _Plain:
    """Runner without graph replay: a layer callback prevents it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute(self, step: ScheduledStep | None, orders: Orders) -> Tensor | None:
        return self._runner.forward(step.batch, lambda layer: None) if step else None


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
