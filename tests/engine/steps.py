"""Driving a runner by hand: prompts, and steps over parts of them."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.runner import ModelRunner

VOCAB_SIZE = 131  # of the random models


def prompts(*lengths: int, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, vocab_size, length).tolist() for length in lengths]


def step(runner: ModelRunner, sequences: list[list[int]], spans: list[tuple[int, int, int]]) -> torch.Tensor:
    """One step over spans (sequence, start, end); sequence i owns blocks 12 i to 12 i + 11."""
    rows = [
        Row(token_ids=sequences[i][start:end], start=start, blocks=range(12 * i, 12 * i + 12), num_logits=1)
        for i, start, end in spans
    ]
    return runner.forward(Batch.of(rows, block_size=runner.layout.block_size))
