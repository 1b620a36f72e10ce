"""Batches of decode steps over filled pools, and the comparison of a replayed step with one that is not."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.kv.pool import KVPool
from engine.runner.runner import ModelRunner
from tests.engine.steps import VOCAB_SIZE

BLOCK_SIZE = 8
NUM_BLOCKS = 150
MAX_CONTEXT = 128  # of the tiny models
MAX_ROWS = 9
# Slots that rows use; there are more.
NUM_STATES = 32


def decode_batch(contexts: list[int], seed: int) -> Batch:
    """Return a batch of one query per row, at the end of its context, over blocks in random order."""
    return batch_of([(context, 1, 1) for context in contexts], seed)


def batch_of(rows: list[tuple[int, int, int]], seed: int) -> Batch:
    """Return a batch. Per row: context at the end, number of tokens computed, and how many of the last of these have
    logits."""
    generator = np.random.default_rng(seed)
    blocks = iter(generator.permutation(NUM_BLOCKS).tolist())
    states = iter(np.random.default_rng(seed).permutation(NUM_STATES).tolist())
    return Batch.of(
        [
            Row(
                token_ids=generator.integers(0, VOCAB_SIZE, num_tokens).tolist(),
                start=context - num_tokens,
                blocks=[next(blocks) for _ in range(-(-context // BLOCK_SIZE))],
                num_logits=num_logits,
                state_index=next(states),
            )
            for context, num_tokens, num_logits in rows
        ],
        block_size=BLOCK_SIZE,
    )


def fill(pool: KVPool, seed: int) -> None:
    """Fill the pool as earlier steps would."""
    every = torch.arange(pool.num_blocks * BLOCK_SIZE, device=pool.device)
    layout = pool.layout
    shape = (layout.num_sides, len(every), *layout.heads[0])
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(pool.device)
    for layer in range(layout.num_layers):
        if layout.num_sides == 1:
            pool.write_latents(layer, every, kv[0, :, 0])
        else:
            pool.write(layer, every, *kv)
    for part in states_of(pool):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(seed)))


def contents(pool: KVPool) -> Tensor:
    """(layers, 2, K, slots, D) fp32."""
    every = torch.arange(pool.num_blocks, device=pool.device)
    return torch.stack([pool.read(layer, every, torch.float32) for layer in range(pool.layout.num_layers)])


def states_of(pool: KVPool) -> list[Tensor]:
    """Return views of the states, (slots, …), of each recurrent layer: matrices and kept inputs."""
    return [part for layer in pool.states for part in layer.tensors]


def check_equal(pair: tuple[ModelRunner, ModelRunner], batch: Batch, *, tolerance: float = 1e-4) -> None:
    """Check that both runners return equal logits, write equal KV and states, and write only to the batch's slots."""
    if pair[0].pool.scales:
        tolerance = max(tolerance, 0.15)  # a value between two codes of e4m3 or int4 may become either
    before, states_before = contents(pair[0].pool), [part.clone() for part in states_of(pair[0].pool)]
    logits = [runner.forward(batch).clone() for runner in pair]
    torch.testing.assert_close(*logits, atol=tolerance, rtol=tolerance)
    after = [contents(runner.pool) for runner in pair]
    torch.testing.assert_close(*after, atol=tolerance, rtol=tolerance)
    is_other = torch.ones(before.shape[3], dtype=torch.bool)
    is_other[batch.slots] = False
    assert torch.equal(after[0][..., is_other, :], before[..., is_other, :])
    for ours, theirs, old in zip(states_of(pair[0].pool), states_of(pair[1].pool), states_before, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
        is_other = torch.ones(len(old), dtype=torch.bool)
        is_other[batch.state_indices] = False
        assert torch.equal(ours[is_other], old[is_other]), "the step writes a state that is not of its rows"
