"""The host's time of a decode step: all that an engine does beside the forward pass, which takes no time here.

`host_ms`: over a vocabulary so small that the search for the likeliest token takes nothing. `greedy_ms`: over the
model's, with that search. `penalty_ms`: what a repetition penalty adds to that, after prompts of random tokens, so that
nearly each is another one. `rank_bytes`: what a rank that follows is told of the rows of a step.

No prompt is computed, they end at different places of their blocks, and every step is booked as in a replica. The kinds
take turns; of all steps of a kind, the time that a tenth of them stays below: others who use the machine meanwhile make
the rest slower, and none quicker.

    cluster bench engine --host --batch 64,256 --context 2048,8192 --json
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.words.request import Sampling, SequenceRequest
from engine.engine import Engine, SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.orders import Orders
from engine.pace import Pace
from engine.prompts import Prompt
from engine.sampler import sample
from engine.sequence import Sequence
from engine.step import ScheduledStep

_BLOCK_SIZE = 16
_NUM_STEPS = 32  # of one try: each sequence gets two blocks
_NUM_TRIES = 8
_FEW_TOKENS = 256


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
    kinds = {
        "host": _Steps(batch, context, _FEW_TOKENS),
        "greedy": _Steps(batch, context, vocabulary),
        "penalty": _Steps(batch, context, vocabulary, repetition_penalty=1.1),
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
        "greedy_ms": round(best["greedy"], 3),
        "penalty_ms": round(best["penalty"] - best["greedy"], 3),
        "rank_bytes": kinds["host"].model.rank_bytes,
    }


class _NoForward:
    """Implements Runner: the same logits in every step, as if they had just been computed."""

    def __init__(self, num_rows: int, vocabulary: int) -> None:
        self.seconds = 0.0  # that are not the host's
        self.rank_bytes = 0  # of the last step
        self._made_RV = torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(0))
        self._logits_RV = torch.empty_like(self._made_RV)

    def execute(self, step: ScheduledStep | None, orders: Orders) -> Tensor | None:
        if step is None:
            return None
        assert len(step.batch.logits_rows) == len(self._made_RV)
        begin = time.perf_counter()
        self.rank_bytes = step.changes.encode().nbytes
        self._logits_RV.copy_(self._made_RV)
        self.seconds += time.perf_counter() - begin
        return self._logits_RV


class _Steps:
    """An engine of sequences that decode, after prompts of about `context` random tokens."""

    def __init__(self, batch: int, context: int, vocabulary: int, **sampling: Any) -> None:
        most = context + _NUM_STEPS * (_NUM_TRIES + 1) + _BLOCK_SIZE
        blocks = BlockManager(batch * -(-most // _BLOCK_SIZE))
        limits = SchedulerConfig(max_batch_tokens=batch * context, max_running=batch, max_waiting=batch)
        self.model = _NoForward(batch, vocabulary)
        self._engine = Engine(self.model, sample, blocks, limits, block_size=_BLOCK_SIZE, pace=Pace())
        numbers = np.random.default_rng(0)
        for i in range(batch):
            num_tokens = max(1, context - i % _BLOCK_SIZE)
            request = SequenceRequest(
                id=str(i),
                token_ids=tuple(numbers.integers(0, vocabulary, num_tokens).tolist()),
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
            begin, not_the_hosts = time.perf_counter(), self.model.seconds
            self._engine.step()
            times.append((time.perf_counter() - begin - (self.model.seconds - not_the_hosts)) * 1e3)
        return times
