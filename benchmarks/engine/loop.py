"""GPU decode steps beyond their kernels: the sampler alone, and synchronous versus async scheduling, with random
weights.

`device_ms`: forward pass and sampler of the same rows, launched back to back. `waits_ms`, `ahead_ms`: engine steps with
all host work, synchronous and async. `same`: both produced the same tokens, one per step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.types.request import Sampling, SequenceRequest
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.runner.runner import ModelRunner
from engine.sampling.params import SamplingRow
from engine.sampling.sampler import choose_by_kernel, choose_by_torch, sample
from engine.scheduler.sequence import Sequence
from engine.spec_decode.speculation import Speculation
from engine.timing.pace import Pace

_SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.8),
    "top-p": Sampling(temperature=0.8, top_p=0.95),
    "top-k, top-p": Sampling(temperature=0.8, top_k=20, top_p=0.8),
}
_BATCHES = ((1, 2048), (8, 2048), (64, 2048))  # rows, context
_NUM_STEPS = 64
_MOST_DRAFTED = 7  # tokens per row
_TRIES = 3


def bench_sampler(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the sampler's device time in microseconds, for nearly flat logits and for those of a confident model."""
    for num_rows, vocabulary in ((64, 128256), (256, 151936)):
        flat = torch.randn(num_rows, vocabulary, device=device, generator=torch.Generator(device).manual_seed(0))
        for name, sampling in _SAMPLINGS.items():
            rows = [
                (i, SamplingRow(sampling=sampling, seed=i, tokens=[0], num_prompt_tokens=1)) for i in range(num_rows)
            ]
            sampled_rows = [] if sampling.is_greedy else rows
            for kind, logits in (("flat", flat), ("sure", flat * 3)):
                yield {
                    "rows": num_rows,
                    "vocabulary": vocabulary,
                    "asks": name,
                    "logits": kind,
                    "kernel": round(_device_us(partial(choose_by_kernel, logits, sampled_rows)), 1),
                    "torch": round(_device_us(partial(choose_by_torch, logits, sampled_rows)), 1),
                }


def bench_steps(runner: ModelRunner) -> Iterator[dict[str, Any]]:
    for (num_rows, context), name in ((b, n) for b in _BATCHES for n in ("greedy", "top-p")):
        found: dict[str, Any] = {"rows": num_rows, "context": context, "asks": name}
        tokens_by_kind = {}
        for kind in ("waits", "ahead"):
            seconds, tokens_by_kind[kind] = _steps(
                runner, num_rows, context, _SAMPLINGS[name], is_async=kind == "ahead"
            )
            found[f"{kind}_ms"] = round(seconds / _NUM_STEPS * 1e3, 3)
        found["device_ms"] = round(_device_ms(runner, num_rows, context, _SAMPLINGS[name]), 3)
        is_whole = all(len(tokens) == _NUM_STEPS for tokens in tokens_by_kind["ahead"])
        yield found | {"same": is_whole and tokens_by_kind["waits"] == tokens_by_kind["ahead"]}


def num_blocks_of_steps() -> int:
    """Return the number of 16-token blocks that bench_steps needs."""
    return max(rows * -(-(context + 2 * _NUM_STEPS) // 16) for rows, context in _BATCHES)


def _steps(
    runner: ModelRunner, num_rows: int, context: int, sampling: Sampling, *, is_async: bool
) -> tuple[float, list[list[int]]]:
    """Return the fastest time of some tries, and the tokens of the last one."""
    best = float("inf")
    for _ in range(_TRIES):
        engine, sequences = running_engine(runner, num_rows, context, sampling, is_async=is_async)
        for _ in range(3):
            engine.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_NUM_STEPS):
            engine.step()
        best = min(best, time.perf_counter() - begin)
        torch.cuda.synchronize()
    return best, [sequence.tokens[context : context + _NUM_STEPS] for sequence in sequences]


def running_engine(
    runner: ModelRunner,
    num_rows: int,
    context: int,
    sampling: Sampling,
    *,
    is_async: bool = False,
    speculation: Speculation | None = None,
) -> tuple[Engine[Tensor], list[Sequence]]:
    """Return an engine with sequences whose KV is arbitrary. With a speculation, it always drafts."""
    size, max_context = runner.layout.block_size, context + 2 * _NUM_STEPS
    sampling = replace(sampling, max_tokens=2 * _NUM_STEPS)
    # Also the number of logits.
    max_tokens = num_rows * (1 + _MOST_DRAFTED) if speculation else num_rows
    limits = SchedulerConfig(max_batch_tokens=max_tokens, max_running=max_tokens, max_waiting=num_rows)
    engine = Engine(
        runner,
        sample,
        BlockManager(runner.pool.num_blocks, num_states=runner.pool.num_states),
        limits,
        block_size=size,
        pace=None if speculation else Pace(),
        is_async=is_async,
        speculation=speculation,
    )
    sequences = []
    for i in range(num_rows):
        request = SequenceRequest(
            id=str(i), token_ids=(i + 1,) * context, num_prompt_tokens=context, sampling=sampling, salt=str(i)
        )
        sequence = Sequence(request, 0, model="", block_size=size, max_context=max_context)
        taken = engine.blocks.allocate([], sequence.num_blocks_for(context))
        assert taken
        sequence.start_with(*taken)
        sequence.num_computed = context - 1
        sequence.sampling_row.seed = i
        engine.decoding.start(sequence)
        sequences.append(sequence)
    return engine, sequences


def _device_ms(runner: ModelRunner, num_rows: int, context: int, sampling: Sampling) -> float:
    engine, sequences = running_engine(runner, num_rows, context, sampling, is_async=False)
    step = engine.launch()
    rows = [sequence.sampling_row for sequence in sequences]
    return _device_us(lambda: sample(runner.forward(step.batch), rows)) / 1e3


def _device_us(work: Callable[[], object]) -> float:
    """Return the best mean of several runs."""
    best = float("inf")
    for _ in range(_TRIES):
        work()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Long enough for the host to launch everything.
        torch.cuda._sleep(4_000_000)
        begin.record()
        for _ in range(8):
            work()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 8 * 1e3)
    return best
