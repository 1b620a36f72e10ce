"""Heads do once what they will do in steps, so that no request waits for kernels to be compiled."""

from __future__ import annotations

import torch

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.kv.pool import KVPool
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.spec_decode.heads.head_row import HeadRow
from engine.spec_decode.heads.heads import DraftHeads


def warm_up_heads(
    heads: DraftHeads, pool: KVPool, *, max_tokens: int, max_rows: int, hidden_size: int, dtype: torch.dtype
) -> None:
    """Follow steps of every power of two of tokens, and draft for as many rows. The model computes nothing, for other
    ranks may have no heads, and would be waited for. Leaves numbers without meaning in the pool's first blocks."""
    size = pool.layout.block_size
    for count in (1 << i for i in range(max_tokens.bit_length())):
        blocks = [number % pool.num_blocks for number in range(-(-count // size))]
        batch = Batch.of([Row([0] * count, 0, blocks, num_logits=1)], block_size=size)
        aux_hidden_states = AuxHiddenStates(heads.layers)
        aux_hidden_states.token_ids_T = torch.zeros(count, dtype=torch.int32, device=pool.device)
        for layer in heads.layers:
            aux_hidden_states.note(layer, torch.zeros(count, hidden_size, dtype=dtype, device=pool.device))
        heads.follow(batch, aux_hidden_states, None)
        rows = [HeadRow(0, count, [*blocks, blocks[0]])] * min(count, max_rows)
        heads.draft(rows, 1, lambda logits, known, place: [0] * len(known))
    heads.attach(pool)  # it knows nothing of these
