"""The host's time of a decode step: all that an engine does beside the forward pass, which takes no time here.

`host_ms`: over a vocabulary so small that the search for the likeliest token takes next to nothing. On a CPU a step is
over when it was launched, and all of this is on its way to the next. `greedy_ms`: over the model's vocabulary, with
that search. `penalty_ms`: what a repetition penalty adds to that, after prompts of random tokens, so that nearly each
is another one. `rank_bytes`: what a rank that follows is told of the rows of a step.

On a GPU steps run ahead, and of the host's work only that is waited for which is not done while a step is computed:

    host     … wait n ─ book n ─ plan n + 2, launch it ─ wait n + 1 ─ book n + 1 …
    device     n ────┤├ n + 1 ──────────────────────────────────┤├ n + 2 …

From the arrival of the tokens of n until n + 2 is launched the device has n + 1 to compute. `ahead_ms`: how long that
takes; a device whose steps take longer never stands still. `idle_ms`: how long one stands still between two steps, each
of which takes it 0.25 ms. The device is a clock, which goes on with the host's and while that waits: it chooses tokens
itself, and what a GPU's driver takes for a launch is not in here (benchmarks.engine.loop measures that on one).

No prompt is computed, they end at different places of their blocks, and every step is booked as in a replica. The kinds
take turns; of all steps of a kind, the time that a tenth of them stays below: others who use the machine meanwhile make
the rest slower, and none quicker. What no other thread has a part in is time of the engine's thread.

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
_NUM_STEPS = 32  # of one try: each sequence gets two blocks
_NUM_TRIES = 8
_FEW_TOKENS = 256
_SHORT_S = 0.25e-3  # no step of a model at such batches is shorter


def bench_host(*, batches: Seq[int], contexts: Seq[int], vocabulary: int, threads: int | None = None) -> dict[str, Any]:
    """Measure; returns plain JSON values. threads: of the sampler, None for all processors."""
    if threads is not None:
        torch.set_num_threads(threads)
    return {
        "host": [_row(batch, context, vocabulary) for context, batch in product(contexts, batches)],
        "vocabulary": vocabulary,
        "threads": torch.get_num_threads(),
    }


def _row(batch: int, context: int, vocabulary: int) -> dict[str, Any]:
    waits = _Waits(batch, _FEW_TOKENS, time.thread_time)
    kinds = {
        "host": _Steps(waits, batch, context),
        "ahead": _Steps(_Ahead(batch, step_s=0.0), batch, context),
        "idle": _Steps(_Ahead(batch, step_s=_SHORT_S), batch, context),
        "greedy": _Steps(_Waits(batch, vocabulary), batch, context),
        "penalty": _Steps(_Waits(batch, vocabulary), batch, context, repetition_penalty=1.1),
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
        "rank_bytes": waits.rank_bytes,
    }


class _Waits:
    """Implements Runner and Sampler where a step is over when it was launched: of the same logits in every step, as if
    they had just been computed."""

    is_async = False

    def __init__(self, num_rows: int, vocabulary: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.vocabulary = vocabulary
        self.rank_bytes = 0  # of the last step
        self._clock = clock
        self._not_the_hosts_s = 0.0
        self._made_RV = torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(0))
        self._logits_RV = torch.empty_like(self._made_RV)

    def execute(self, step: ScheduledStep | None, orders: Orders) -> Tensor | None:
        if step is None:
            return None
        assert len(step.batch.logits_rows) == len(self._made_RV)
        begin = self._clock()
        self.rank_bytes = step.changes.encode().nbytes
        self._logits_RV.copy_(self._made_RV)
        self._not_the_hosts_s += self._clock() - begin
        return self._logits_RV

    def sample(self, logits_RV: Tensor, rows: Seq[SamplingRow], positions: Seq[int] | None) -> Sampled:
        return sample(logits_RV, rows, positions)

    def seconds(self) -> float:
        """Of the host's work so far."""
        return self._clock() - self._not_the_hosts_s


class _Ahead:
    """Implements Runner and Sampler: a device that computes while the host goes on, each step for so long."""

    is_async = True
    vocabulary = _FEW_TOKENS

    def __init__(self, num_rows: int, *, step_s: float) -> None:
        self._ids_R = np.random.default_rng(0).integers(0, _FEW_TOKENS, num_rows)
        self._step_s = step_s
        self._waited_s = 0.0  # by the host
        self._over_at = 0.0  # all that was launched
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
        """In which it has had nothing to do."""
        return self._idle_s

    def _now(self) -> float:
        return time.thread_time() + self._waited_s


class _Steps:
    """An engine of sequences that decode, after prompts of about `context` random tokens."""

    def __init__(self, model: _Waits | _Ahead, batch: int, context: int, **sampling: Any) -> None:
        most = context + _NUM_STEPS * (_NUM_TRIES + 1) + _BLOCK_SIZE
        blocks = BlockManager(batch * -(-most // _BLOCK_SIZE))
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
                sampling=Sampling(temperature=0.0, max_tokens=most, **sampling),
                salt=str(i),
            )
            self._engine.add(Prompt(Sequence(request, 0, model="", block_size=_BLOCK_SIZE, max_context=most)))
        self.times_ms()

    def times_ms(self) -> list[float]:
        """Of each of some steps."""
        times = []
        for _ in range(_NUM_STEPS):
            begin = self._model.seconds()
            self._engine.step()
            times.append((self._model.seconds() - begin) * 1e3)
        return times
