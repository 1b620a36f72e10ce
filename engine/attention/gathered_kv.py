"""Where the keys of a step's prompts lie when their blocks are gathered: one row behind the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch.device_batch import PromptRows, upload
from engine.kernels.language import cdiv
from engine.kv.pool import KVPool

# R rows, N blocks that are gathered


@dataclass(frozen=True)
class GatheredRows:
    """The blocks that hold some positions of each row, or all."""

    blocks_N: Tensor  # int32 block ids
    firsts_R: Tensor  # int32, where each row's keys begin among those of all blocks

    @classmethod
    def of(cls, rows: PromptRows, pool: KVPool, begin: int = 0, end: int | None = None) -> GatheredRows:
        """begin, end: positions, multiples of the block size."""
        block_size = pool.layout.block_size
        first, last = begin // block_size, None if end is None else end // block_size
        counts = [cdiv(length, block_size) for length in rows.context_lens]
        parts = [table[:count][first:last] for table, count in zip(rows.tables_RB, counts, strict=True)]
        begins = np.cumsum([0, *(len(part) for part in parts)])[:-1] * block_size
        (firsts_R,) = upload([begins], pool.device)
        return cls(torch.cat(parts), firsts_R)
