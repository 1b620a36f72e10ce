"""Layout of the gathered keys of a step's prompts: one row after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch.device_batch import PromptRows, upload
from engine.kernels.language import cdiv
from engine.kv.pool import KVPool

# R rows, N gathered blocks


@dataclass(frozen=True)
class GatheredRows:
    """Blocks that hold all positions of each row, or a range of them."""

    # int32 block ids.
    blocks_N: Tensor
    # int32 offset of each row's keys among the keys of all blocks.
    firsts_R: Tensor

    @classmethod
    def of(cls, rows: PromptRows, pool: KVPool, begin: int = 0, end: int | None = None) -> GatheredRows:
        """Select the blocks of positions [begin, end) of each row; both are multiples of the block size."""
        block_size = pool.layout.block_size
        first, last = begin // block_size, None if end is None else end // block_size
        counts = [cdiv(length, block_size) for length in rows.context_lens]
        parts = [table[:count][first:last] for table, count in zip(rows.tables_RB, counts, strict=True)]
        begins = np.cumsum([0, *(len(part) for part in parts)])[:-1] * block_size
        (firsts_R,) = upload([begins], pool.device)
        return cls(torch.cat(parts), firsts_R)
