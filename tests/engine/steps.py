"""Driving a runner by hand: random numbers and prompts, and steps over parts of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from core.types.request import SequenceRequest
from engine.attention.heads import in_windows
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.batch.rows import Row
from engine.cpu.library import open_kernels
from engine.model.layer_kinds import StepStates
from engine.runner.runner import ModelRunner
from engine.scheduler.row_updates import LastRows
from engine.scheduler.sequence import Sequence

VOCAB_SIZE = 131  # of the random models


needs_compiler = pytest.mark.skipif(
    open_kernels(dtype=torch.bfloat16, device=torch.device("cpu")) is None, reason="no C++ compiler here"
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return random(*shape, seed=seed).bfloat16()


def prompts(*lengths: int, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def step(runner: ModelRunner, sequences: list[list[int]], spans: list[tuple[int, int, int]]) -> torch.Tensor:
    """Run one step over spans (sequence, start, end); sequence i owns blocks 12 i to 12 i + 11."""
    rows = [
        Row(sequences[i][start:end], start=start, blocks=range(12 * i, 12 * i + 12), num_logits=1, state_index=i)
        for i, start, end in spans
    ]
    return runner.forward(Batch.of(rows, block_size=runner.layout.block_size))


def as_on_gpu(runner: ModelRunner, batch: Batch, **options: Any) -> torch.Tensor:
    """Return the logits of a step whose batch is on the device, as a GPU computes it. options: of `compute`."""
    with torch.inference_mode():
        states = StepStates.of(batch, runner.pool)
        on_device = DeviceBatch.of(batch, runner.device, windowed=in_windows(batch, runner.pool))
        return runner._model.compute(on_device, runner.pool, states=states, **options)


class DecodeSteps:
    """Decoding sequences whose batches are sent as differences to the step before."""

    def __init__(self, contexts: list[int], tables: list[list[int]], *, block_size: int) -> None:
        """Take the contexts of the first step, and all blocks that each sequence will ever need."""
        self._last_rows = LastRows(block_size)
        self.sequences = []
        for i, (context, table) in enumerate(zip(contexts, tables, strict=True)):
            request = SequenceRequest(id="r", token_ids=(i + 1,) * context, num_prompt_tokens=context)
            sequence = Sequence(request, 0, model="m", block_size=block_size, max_context=len(table) * block_size)
            sequence.start_with(table, 0)
            sequence.num_computed = context - 1
            self.sequences.append(sequence)

    def batch(self, drafts: Mapping[int, list[int]] = MappingProxyType({})) -> Batch:
        """Return the batch of the next step. drafts: by row; they are right."""
        changes = self._last_rows.changes(list(self.sequences), [1] * len(self.sequences), drafts=drafts)
        for row, sequence in enumerate(self.sequences):
            sequence.tokens += [*drafts.get(row, ()), len(sequence.tokens)]
            sequence.num_computed += 1 + len(drafts.get(row, ()))
        return self._last_rows.apply(changes)
