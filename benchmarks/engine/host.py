"""Host time of a decode step: all work of an engine except the forward pass, which takes no time here.

`host_ms`: time with a vocabulary so small that the argmax costs almost nothing. On a CPU, a step is finished when it is
launched, so all of this delays the next one. `greedy_ms`: time with the model's vocabulary, including the argmax.
`penalty_ms`: additional time for a repetition penalty, after prompts of random, mostly distinct tokens. `rank_bytes`:
bytes sent to each follower rank per step.

On a GPU, steps are scheduled ahead, and only the host work that does not overlap with a step delays the device:

    host     … wait n ─ book n ─ plan n + 2, launch it ─ wait n + 1 ─ book n + 1 …
    device     n ────┤├ n + 1 ──────────────────────────────────┤├ n + 2 …

Between the arrival of step n's tokens and the launch of n + 2, the device computes n + 1. `ahead_ms` is the length of
that interval: a device with longer steps is never idle. `idle_ms` is the idle time between two steps of 0.25 ms each.
The device is simulated by a clock that also runs while the host is waiting; it samples tokens itself. Launch cost in a
GPU driver is not included (tests.gpu_check.loop measures it on a GPU).

No prompt is computed, contexts end at different positions in their blocks, and every step is recorded as in a replica.
The kinds alternate; each figure is the 10 % quantile of all steps of a kind, because other users of the machine can
only slow steps down. Work without other threads is measured as CPU time of the engine's thread.

    python -m benchmarks engine --host --batch 64,256 --context 2048,8192 --json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.types.request import Sampling, SequenceRequest
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.sampling.params import Chosen, Sampled, SamplingRow
from engine.sampling.sampler import sample
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from engine.timing.pace import Pace

_BLOCK_SIZE = 16
# Steps of one try: two blocks per sequence.
_NUM_STEPS = 32
_NUM_TRIES = 8
_FEW_TOKENS = 256
# No model has shorter steps at such batches.
_SHORT_S = 0.25e-3


def bench_host(*, batches: Seq[int], contexts: Seq[int], vocabulary: int, threads: int | None = None) -> dict[str, Any]:
    """Measure, and return plain JSON values. threads: the sampler's; None: all processors."""
    if threads is not None:
        torch.set_num_threads(threads)
    return {
        "host": [_row(batch, context, vocabulary) for context, batch in product(contexts, batches)],
        "vocabulary": vocabulary,
        "threads": torch.get_num_threads(),
    }


def _row(batch: int, context: int, vocabulary: int) -> dict[str, Any]:
    sync = _SyncDevice(batch, _FEW_TOKENS, time.thread_time)
    kinds = {
        "host": _Steps(sync, batch, context),
        "ahead": _Steps(_AsyncDevice(batch, step_s=0.0), batch, context),
        "idle": _Steps(_AsyncDevice(batch, step_s=_SHORT_S), batch, context),
        "greedy": _Steps(_SyncDevice(batch, vocabulary), batch, context),
        "penalty": _Steps(_SyncDevice(batch, vocabulary), batch, context, repetition_penalty=1.1),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(_NUM_TRIES):
        for kind, steps in kinds.items():
            times[kind] += steps.times_ms()
    best = {kind: float(np.quantile(of, 0.1)) for kind, of in times.items()}
    return {
        "batch": batch,
        "context": context,
        "host_ms": round(best["host"], 3),
        "ahead_ms": round(best["ahead"], 3),
        "idle_ms": round(best["idle"], 3),
        "greedy_ms": round(best["greedy"], 3),
        "penalty_ms": round(best["penalty"] - best["greedy"], 3),
        "rank_bytes": sync.rank_bytes,
    }


class _SyncDevice:
    """Runner and Sampler with synchronous steps that return the same logits every time."""

    is_async = False

    def __init__(self, num_rows: int, vocabulary: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.vocabulary = vocabulary
        self.rank_bytes = 0  # of the last step
        self._clock = clock
        self._excluded_s = 0.0
        self._constant_RV = torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(0))
        self._logits_RV = torch.empty_like(self._constant_RV)

    def execute(self, step: ScheduledStep | None, orders: Orders) -> Tensor | None:
        if step is None:
            return None
        assert len(step.batch.logits_rows) == len(self._constant_RV)
        begin = self._clock()
        self.rank_bytes = step.changes.encode().nbytes
        self._logits_RV.copy_(self._constant_RV)
        self._excluded_s += self._clock() - begin
        return self._logits_RV

    def sample(self, logits_RV: Tensor, rows: Seq[SamplingRow], positions: Seq[int] | None) -> Sampled:
        return sample(logits_RV, rows, positions)

    def seconds(self) -> float:
        """Return the seconds of host work so far."""
        return self._clock() - self._excluded_s


class _AsyncDevice:
    """Runner and Sampler of a device that computes concurrently with the host, `step_s` per step."""

    is_async = True
    vocabulary = _FEW_TOKENS

    def __init__(self, num_rows: int, *, step_s: float) -> None:
        self._ids_R = np.random.default_rng(0).integers(0, _FEW_TOKENS, num_rows)
        self._step_s = step_s
        self._waited_s = 0.0  # seconds that the host waited
        # Time at which everything launched is finished.
        self._over_at = 0.0
        self._idle_s = 0.0

    def execute(self, step: ScheduledStep | None, orders: Orders) -> str | None:
        return "logits" if step and len(step.batch.logits_rows) else None

    def sample(self, logits: str, rows: Seq[SamplingRow], positions: Seq[int] | None) -> Sampled:
        now = self._now()
        self._idle_s += max(0.0, now - self._over_at)
        over_at = self._over_at = max(now, self._over_at) + self._step_s

        def wait() -> Seq[Chosen | None]:
            self._waited_s += max(0.0, over_at - self._now())
            return [(token_id, None) for token_id in self._ids_R.tolist()]

        return Sampled(self._ids_R, wait)

    def seconds(self) -> float:
        """Return the seconds in which the device was idle."""
        return self._idle_s

    def _now(self) -> float:
        return time.thread_time() + self._waited_s


class _Steps:
    """Engine with decoding sequences, after prompts of about `context` random tokens."""

    def __init__(self, model: _SyncDevice | _AsyncDevice, batch: int, context: int, **sampling: Any) -> None:
        max_context = context + _NUM_STEPS * (_NUM_TRIES + 1) + _BLOCK_SIZE
        blocks = BlockManager(batch * -(-max_context // _BLOCK_SIZE))
        limits = SchedulerConfig(max_batch_tokens=batch * context, max_running=batch, max_waiting=batch)
        self._model = model
        self._engine: Engine[Any] = Engine(
            *(model, model.sample, blocks, limits),
            block_size=_BLOCK_SIZE,
            pace=Pace(),
            is_async=model.is_async,
        )
        numbers = np.random.default_rng(0)
        for i in range(batch):
            num_tokens = max(1, context - i % _BLOCK_SIZE)
            request = SequenceRequest(
                id=str(i),
                token_ids=tuple(numbers.integers(0, model.vocabulary, num_tokens).tolist()),
                num_prompt_tokens=num_tokens,
                sampling=Sampling(temperature=0.0, max_tokens=max_context, **sampling),
                salt=str(i),
            )
            self._engine.add(Prompt(Sequence(request, 0, model="", block_size=_BLOCK_SIZE, max_context=max_context)))
        self.times_ms()

    def times_ms(self) -> list[float]:
        """Run some steps, and return the time of each."""
        times = []
        for _ in range(_NUM_STEPS):
            begin = self._model.seconds()
            self._engine.step()
            times.append((self._model.seconds() - begin) * 1e3)
        return times
