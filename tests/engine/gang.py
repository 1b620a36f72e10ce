"""Functions that run on ranks in separate processes, for tests of tensor parallelism."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import FileStore

from core.types.request import Sampling
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.kernels.moe.expert_router import RoutedTokens
from engine.model import expert_parallel as expert_parallel_module
from engine.model.expert_bank import Bank
from engine.model.norms import ProjectionNorm
from engine.runner.parallel import TensorParallel
from engine.runner.runner import ModelRunner
from engine.tools.offline import generate
from tests.engine.fake_capture import FakeReplays
from tests.engine.kernels.launched import refer_on_cpu
from tests.engine.steps import step

StartGang = Callable[..., list[Future[Any]]]  # start_gang(size, function, ...); see conftest.py

CPU = torch.device("cpu")


def on_rank(
    function: Callable[..., Any], place: Path, prefix: str, rank: int, size: int, timeout_s: float, arguments: Any
) -> Any:
    """Join the other ranks, and return function(parallel, ...)."""
    torch.set_num_threads(1)
    return function(join(place, prefix, rank, size, timeout_s=timeout_s), *arguments)


def join(place: Path, prefix: str, rank: int, size: int, *, timeout_s: float) -> TensorParallel:
    store, times = FileStore(str(place)), {"meet_s": timeout_s, "timeout_s": timeout_s}
    return TensorParallel.join(store, prefix=prefix, rank=rank, size=size, host="127.0.0.1", device=CPU, **times)


def logits_in_three_steps(
    parallel: TensorParallel, directory: Path, sequences: list[list[int]], expert_parallel: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return this rank's logits of three steps: a chunk without logits, prompts without their last token, one token
    each."""
    config = EngineConfig(
        model_dir=directory, dtype="float32", block_size=8, num_blocks=96, expert_parallel=expert_parallel
    )
    runner = ModelRunner(config, parallel)
    first_chunk = Row(token_ids=sequences[0][:5], start=0, blocks=[0], num_logits=0)
    chunk = runner.forward(Batch.of([first_chunk], block_size=8))
    prompts = step(runner, sequences, [(i, 5 if i == 0 else 0, len(s) - 1) for i, s in enumerate(sequences)])
    tokens = step(runner, sequences, [(i, len(s) - 1, len(s)) for i, s in enumerate(sequences)])
    return chunk.clone(), prompts.clone(), tokens.clone()


def normed_projection(
    parallel: TensorParallel, rows: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Norm this rank's features of queries and keys. Returns its queries, keys and values."""
    num_q, num_k = len(q_weight), len(k_weight)
    parts = [x.chunk(parallel.size, dim=-1)[parallel.rank] for x in torch.split(rows, [num_q, num_k, num_k], dim=-1)]
    weights = [weight.chunk(parallel.size)[parallel.rank] for weight in (q_weight, k_weight)]
    normed = ProjectionNorm(*weights, num_q, num_k, 1.0, 1e-5, parallel)(torch.cat(parts, dim=-1))
    return tuple(x.clone() for x in torch.split(normed, [part.shape[-1] for part in parts], dim=-1))


def replayed_steps(parallel: TensorParallel, directory: Path) -> tuple[list[torch.Tensor], int]:
    """Run decode steps of 1 to 3 rows with FakeReplays. Returns this rank's logits, and the number of replays."""
    refer_on_cpu(pytest.MonkeyPatch())
    replays, logits = FakeReplays(), list[torch.Tensor]()
    config = EngineConfig(model_dir=directory, dtype="float32", block_size=8, num_blocks=12, recorded_rows=3)
    runner = ModelRunner(config, parallel, capture=replays)
    for num_rows in (1, 3, 2, 3):
        rows = [Row(token_ids=[7 + i], start=5 * i, blocks=[3 * i, 3 * i + 1], num_logits=1) for i in range(num_rows)]
        logits.append(runner.forward(Batch.of(rows, block_size=8)).clone())
    return logits, replays.num_replays


def broadcasts(parallel: TensorParallel, messages: list[bytes]) -> list[bytes]:
    arrays = [np.frombuffer(m + bytes(-len(m) % 8), dtype=np.int64) for m in messages]
    received = [parallel.broadcast_bytes(m if parallel.is_leader else None) for m in messages]
    assert parallel.least(parallel.rank + 7) == 7
    for array in arrays:
        np.testing.assert_array_equal(parallel.broadcast(array if parallel.is_leader else None), array)
    return received


def wait_for_dying_rank(parallel: TensorParallel) -> str:
    """End the last rank in the middle of an operation; the others return their error."""
    parallel.all_reduce(torch.ones(4))
    if parallel.rank == parallel.size - 1:
        os._exit(1)
    try:
        parallel.all_reduce(torch.ones(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def tokens(
    parallel: TensorParallel,
    directory: Path,
    prompts: list[list[int]],
    expert_parallel: bool,
    redundant_experts: int = 0,
    steps_between_plans: int = expert_parallel_module.STEPS_BETWEEN_PLANS,
) -> list[list[int]]:
    """Return the tokens that the gang generates greedily."""
    expert_parallel_module.STEPS_BETWEEN_PLANS = steps_between_plans
    config = EngineConfig(
        model_dir=directory,
        dtype="float32",
        block_size=8,
        num_blocks=96,
        expert_parallel=expert_parallel,
        redundant_experts=redundant_experts,
    )
    runner = ModelRunner(config, parallel)
    outputs = generate(runner, prompts, Sampling(max_tokens=12, temperature=0.0))
    return [[token.token_id for token in output] for output in outputs]


def all_to_all(parallel: TensorParallel, counts: list[list[int]]) -> torch.Tensor:
    """Send counts[a][b] rows from rank a to rank b; each row contains its source and its number."""
    rank = parallel.rank
    rows = [[rank, other, i] for other in range(parallel.size) for i in range(counts[rank][other])]
    sent = torch.tensor(rows, dtype=torch.bfloat16).view(-1, 3)
    return parallel.all_to_all(sent, counts[rank], [counts[other][rank] for other in range(parallel.size)])


def experts_that_move(
    parallel: TensorParallel, num_experts: int, redundant: int, steps_between_plans: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Route all of five tokens to the last expert, four times. An expert multiplies by its number.

    Returns the banks that this rank has made, and the output of each step.
    """
    expert_parallel_module.STEPS_BETWEEN_PLANS = steps_between_plans
    banks: list[list[int]] = []

    def read(experts: Sequence[int]) -> Bank:
        banks.append(list(experts))
        return lambda x_TE, chosen_TC: (x_TE * torch.tensor(experts)[chosen_TC]).unsqueeze(1)

    experts = expert_parallel_module.SpreadExperts(read, num_experts, parallel, redundant=redundant)
    chosen, weights = torch.full((5, 1), num_experts - 1), torch.ones(5, 1)
    outputs = [experts(torch.ones(5, 1), RoutedTokens(chosen, weights)).flatten().tolist() for _ in range(4)]
    return banks, outputs
