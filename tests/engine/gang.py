"""Ranks in processes of their own, for tests of tensor parallelism: what each of them runs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch.distributed import FileStore

from engine.batch import Batch, Row
from engine.parallel import TensorParallel
from engine.runner import ModelRunner, layout_for
from tests.engine.steps import step

CPU = torch.device("cpu")


def join(place: Path, prefix: str, rank: int, size: int, *, timeout_s: float = 20.0) -> TensorParallel:
    torch.set_num_threads(1)
    store = FileStore(str(place))
    return TensorParallel.join(
        store, prefix=prefix, rank=rank, size=size, host="127.0.0.1", device=CPU, meet_s=timeout_s, timeout_s=timeout_s
    )


def logits_in_three_steps(
    place: Path, prefix: str, rank: int, size: int, directory: Path, sequences: list[list[int]], dtype: str
) -> tuple[torch.Tensor, ...]:
    """A chunk that wants no logits, prompts but for their last token, and one token each: this rank's logits."""
    parallel = join(place, prefix, rank, size)
    layout = layout_for(directory, dtype=dtype, block_size=8, tensor_parallel=size)
    runner = ModelRunner(
        directory, layout=layout, num_blocks=96, dtype=getattr(torch, dtype), device=CPU, parallel=parallel
    )
    first_chunk = Row(token_ids=sequences[0][:5], start=0, blocks=[0], wants_logits=False)
    chunk = runner.forward(Batch.of([first_chunk], block_size=8))
    prompts = step(runner, sequences, [(i, 5 if i == 0 else 0, len(s) - 1) for i, s in enumerate(sequences)])
    tokens = step(runner, sequences, [(i, len(s) - 1, len(s)) for i, s in enumerate(sequences)])
    return chunk.clone(), prompts.clone(), tokens.clone()


def broadcasts(place: Path, prefix: str, rank: int, size: int, messages: list[bytes]) -> list[bytes]:
    parallel = join(place, prefix, rank, size)
    arrays = [np.frombuffer(m + bytes(-len(m) % 8), dtype=np.int64) for m in messages]
    received = [parallel.broadcast_bytes(m if parallel.is_leader else None) for m in messages]
    for array in arrays:
        np.testing.assert_array_equal(parallel.broadcast(array if parallel.is_leader else None), array)
    return received


def wait_for_a_rank_that_dies(place: Path, prefix: str, rank: int, size: int) -> str:
    """The last rank ends in the middle of it; the others say what they saw."""
    parallel = join(place, prefix, rank, size, timeout_s=5.0)
    parallel.all_reduce(torch.ones(4))
    if rank == size - 1:
        os._exit(1)
    try:
        parallel.all_reduce(torch.ones(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def join_alone(place: Path, prefix: str) -> str:
    try:
        join(place, prefix, 0, 2, timeout_s=0.5)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
