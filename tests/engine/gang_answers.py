"""Functions that run on ranks in separate processes: answers with and without async scheduling."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from core.types.errors import ReplicaLost
from core.types.request import Sampling
from engine.batch.batch import DeviceTokens
from engine.config import EngineConfig
from engine.engine import SchedulerConfig
from engine.kernels.sample import NOT_FINITE
from engine.kv.block_manager import BlockManager
from engine.runner.parallel import TensorParallel
from engine.runner.runner import ModelRunner
from engine.sampling import sampler
from engine.sampling.sampler import choose_by_torch
from engine.scheduler.step import ScheduledStep
from engine.scheduler.step_commands import Orders
from tests.engine.engine_requests import (
    AMPLE,
    AnswerText,
    Asked,
    answers,
    check_with_leavers,
    letters_grammar,
    one_of_each_kind,
)
from tests.engine.fake_capture import FakeReplays
from tests.engine.kernels.launched import refer_on_cpu
from tests.engine.steps import VOCAB_SIZE, prompts
from worker.gang_runner import GangRunner

# So many stop tokens that answers end at unpredictable places.
_STOPS = tuple(range(0, VOCAB_SIZE, 9))
_NUM_BLOCKS = 512
# Seed of a choice that gets no sixth token, if steps are replayed.
_FAILING = 3


class Leader:
    """Rank 0 of a gang, for `answers`."""

    def __init__(self, gang: GangRunner, *, beats: bool = False) -> None:
        """beats: send orders without rows between all steps, as a replica does that ships and stores blocks."""
        self.gang = gang
        self.layout, self.pool = gang.runner.layout, gang.runner.pool
        self._beats = beats

    def execute(self, step: ScheduledStep | None, orders: Orders) -> Tensor | None:
        if self._beats:
            self.gang.execute(None, Orders())
        return self.gang.execute(step, orders)


def gang_of(
    parallel: TensorParallel, directory: Path, *, dtype: str = "float32", capture: Any = None, **config: Any
) -> GangRunner:
    options = {"block_size": 8, "num_blocks": _NUM_BLOCKS} | config
    runner = ModelRunner(EngineConfig(model_dir=directory, dtype=dtype, **options), parallel, capture=capture)
    sender: Any = None  # nothing is sent
    return GangRunner(runner, sender, None)


def answers_of_each_kind(
    parallel: TensorParallel, directory: Path, grammars: Path
) -> tuple[AnswerText, AnswerText] | None:
    """Return the answers without and with async scheduling; None on the ranks that follow."""
    gang = gang_of(parallel, directory)
    if parallel.rank:
        gang.follow()
        return None
    asked = [_sequential_request(one) for one in one_of_each_kind(letters_grammar(grammars))]
    leader = Leader(gang, beats=True)
    waits, ahead = (answers(leader, asked, is_async=runs) for runs in (False, True))  # type: ignore[arg-type]
    check_with_leavers(leader, asked, waits, None, blocks=BlockManager(_NUM_BLOCKS), is_async=True)  # type: ignore[arg-type]
    gang.execute(None, Orders(stop=True))
    return waits, ahead


def _sequential_request(one: Asked) -> Asked:
    """Return a request whose tokens must be known one by one, which disables async scheduling while it runs."""
    rules = one.sampling.token_rules
    waits = one.grammar or one.sampling.has_penalties or (rules and rules.bad_words)
    return replace(one, sampling=replace(one.sampling, max_tokens=4)) if waits else one


def answers_with_preemption(
    parallel: TensorParallel, directory: Path, max_batch_tokens: int, num_blocks: int
) -> tuple[AnswerText, AnswerText] | None:
    """Like `answers_of_each_kind`, with preemption, and with rows whose bits do not depend on the batch."""
    gang = gang_of(parallel, directory, dtype="bfloat16", deterministic=True)
    if parallel.rank:
        gang.follow()
        return None
    texts, sampling = prompts(40, 9, 22, 31, 5), Sampling(temperature=0.9, top_p=0.8, max_tokens=30)
    asked = [Asked(prompt, replace(sampling, seed=i), num_choices=1 + i % 2) for i, prompt in enumerate(texts)]
    asked[1] = replace(asked[1], sampling=replace(sampling, stop_token_ids=_STOPS))
    asked[2] = replace(asked[2], sampling=replace(sampling, temperature=0.0))
    limits = SchedulerConfig(max_batch_tokens=max_batch_tokens, max_running=8, max_waiting=9)
    waits, ahead = (
        answers(Leader(gang), asked, limits, num_blocks, is_async=runs)  # type: ignore[arg-type]
        for runs in (False, True)
    )
    gang.execute(None, Orders(stop=True))
    return waits, ahead


def answers_by_replays(parallel: TensorParallel, directory: Path) -> tuple[AnswerText, AnswerText, int] | None:
    """Replay every step with device-side tokens, whatever the host knows of them.

    Returns the answers without and with async scheduling, and the number of replays.
    """
    refer_on_cpu(pytest.MonkeyPatch())
    replays = FakeReplays()
    limits = SchedulerConfig(max_batch_tokens=8, max_running=8, max_waiting=9)
    gang = gang_of(parallel, directory, recorded_rows=limits.max_batch_tokens, max_context=64, capture=replays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceTokens, "fill", _not_on_the_host)
        patch.setattr(sampler, "choose_by_torch", _sample_on_device)
        if parallel.rank:
            gang.follow()
            return None
        asked = [
            Asked(prompt, Sampling(temperature=0.9 * (i % 2), seed=i, max_tokens=6 + 9 * i, stop_token_ids=stops))
            for i, (prompt, stops) in enumerate(zip(prompts(9, 20, 3, 17), ((), _STOPS, (), ()), strict=True))
        ]
        waits, ahead = (
            answers(Leader(gang), asked, limits, is_async=runs)  # type: ignore[arg-type]
            for runs in (False, True)
        )
        gang.execute(None, Orders(stop=True))
        return waits, ahead, replays.num_replays


def _not_on_the_host(device_tokens: DeviceTokens, token_ids_T: np.ndarray) -> None:
    token_ids_T[device_tokens.places] = 0


def _sample_on_device(logits_RV: Tensor, rows: Any) -> Tensor:
    """Sample on the device; one choice finds no token, as if its logits were not finite."""
    chosen_R = choose_by_torch(logits_RV, rows).to(torch.int32)
    failing = [i for i, row in rows if row.sampling.seed == _FAILING and row.num_generated == 5]
    return chosen_R.index_fill(0, torch.tensor(failing, dtype=torch.int64), NOT_FINITE)


def lead_dying_rank(parallel: TensorParallel, directory: Path) -> str:
    """Lead a rank that ends after it has received a step behind another one, and gets no tokens for it."""
    gang = gang_of(parallel, directory)
    if parallel.rank:
        gang.runner.parallel.broadcast_on_device = _die  # type: ignore[method-assign]
        gang.follow()
    asked = [Asked(prompt, Sampling(temperature=0.0, max_tokens=9)) for prompt in prompts(9, 20)]
    try:
        answers(Leader(gang), asked, AMPLE, is_async=True)  # type: ignore[arg-type]
    except ReplicaLost as error:
        return str(error)
    return "nothing"


def fail_while_leading(parallel: TensorParallel, directory: Path) -> str:
    """Fail on rank 0 after sending a step behind another one, without sending its tokens."""
    gang = gang_of(parallel, directory)
    asked = [Asked(prompt, Sampling(temperature=0.0, max_tokens=9)) for prompt in prompts(9, 20)]
    try:
        if parallel.rank:
            gang.follow()
        gang.runner.parallel.broadcast_on_device = _fail  # type: ignore[method-assign]
        answers(Leader(gang), asked, AMPLE, is_async=True)  # type: ignore[arg-type]
    except (ReplicaLost, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _fail(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("a fault of rank 0")


def _die(x: torch.Tensor) -> torch.Tensor:
    os._exit(1)
