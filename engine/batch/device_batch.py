"""A step's batch on the device: what the forward pass of a GPU computes on. It came there in one copy."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Ints
from engine.kernels.attention.query_groups import QueryGroups, cut_query_groups
from engine.kernels.attention.query_tiles import QueryTiles, cut_tiles
from engine.runner import streams

# T tokens of the step, R rows, B blocks of the longest table

# Of a row: so often its keys are read sooner than by what reads them once, for prompts (Llama 8B's heads on an H200).
_MAX_QUERY_GROUPS, _MOST_FEW = 3, 16
_NONE = np.zeros(0, dtype=np.int64)
_ALIGNED = 4  # numbers: arrays begin at multiples of 16 bytes, for kernels are compiled anew for pointers that do not


@dataclass(frozen=True)
class PromptRows:
    """Rows of more queries than few strips have."""

    tiles: QueryTiles
    tables_RB: Tensor
    contexts_R: Tensor
    context_lens: list[int]  # the same, on the host
    query_lens: list[int]


@dataclass(frozen=True)
class DeviceBatch:
    """See Batch; of rows without adapters, for ModelRunner refuses the others. All tensors are int32, on the device;
    what is computed from them never comes back to the host."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor  # negative: the token's KV is not stored
    logits_rows: Tensor | None  # None: those of all tokens are wanted
    query_groups: QueryGroups | None  # of the other rows
    prompts: PromptRows | None
    scored_rows: Tensor | None = None  # None: there are none

    @classmethod
    def of(cls, batch: Batch, device: torch.device, *, most_queries: int = 1) -> DeviceBatch:
        """Start the copy; nothing waits for it but what comes behind it on the device. most_queries: of a strip."""
        begins_R = np.cumsum(batch.query_lens) - batch.query_lens
        is_few = batch.query_lens <= (min(_MAX_QUERY_GROUPS * most_queries, _MOST_FEW) if most_queries > 1 else 1)
        few, several = np.flatnonzero(is_few), np.flatnonzero(~is_few)
        query_groups = cut_query_groups(batch.query_lens[few], batch.context_lens[few], most=most_queries)
        rows_U = few[query_groups.rows_U]
        firsts = begins_R[rows_U] + query_groups.firsts_U
        device_tokens = batch.device_tokens
        token_ids, positions, slots, logits_rows, scored_rows, sources, places, *more = upload(
            [
                *(batch.token_ids, batch.positions, batch.slots, batch.logits_rows, batch.scored_rows),
                *((device_tokens.sources, device_tokens.places) if device_tokens else (_NONE, _NONE)),
                *(firsts, query_groups.counts_U, batch.block_tables[rows_U], query_groups.contexts_U),
                *(np.repeat(firsts, query_groups.counts_U) + query_groups.places_N, query_groups.seats_N(most_queries)),
                *cut_tiles(batch.query_lens[several], batch.context_lens[several]),
                *(begins_R[several], batch.query_lens[several]),
                *(batch.block_tables[several], batch.context_lens[several]),
            ],
            device,
        )
        if device_tokens:
            token_ids[places] = device_tokens.token_ids[sources].clamp_min(0)
        *of_query_groups, rows, begins_in_row, begins, lengths, tables, contexts = more
        longest = int(batch.context_lens[few].max(initial=0))
        tiles = QueryTiles(rows, begins_in_row, begins, lengths)
        return cls(
            token_ids,
            positions,
            slots,
            logits_rows,
            QueryGroups.of(of_query_groups, most=most_queries, longest=longest) if len(few) else None,
            PromptRows(
                tiles, tables, contexts, batch.context_lens[several].tolist(), batch.query_lens[several].tolist()
            )
            if len(several)
            else None,
            scored_rows if len(scored_rows) else None,
        )


def upload(arrays: Seq[Ints | NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy whole numbers to the device as int32, each array in its own shape, all of them at once.

    This returns before a GPU has them.
    """
    ours = streams.streams_of(device)
    sizes = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]
    host = ours.page_locked(sum(sizes), torch.int32)
    numbers = host.numpy()
    for array, end, size in zip(arrays, np.cumsum(sizes).tolist(), sizes, strict=True):
        numbers[end - size : end - size + array.size] = array.ravel()
    parts = torch.split(ours.upload(host), sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
