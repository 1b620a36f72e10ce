"""Batch of one step on the device, uploaded in one copy, as input of the GPU forward pass."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Ints
from engine.kernels.attention.queries import QueryGroups, QueryTiles, cut_query_groups, cut_tiles
from engine.runner import streams

# T tokens of the step, R rows, B blocks of the longest table

# Up to this many query groups per row, reading its keys once per group is faster than the prefill kernel, which reads
# them once (measured with the heads of Llama 8B on an H200).
_MAX_QUERY_GROUPS, _MOST_FEW = 3, 16
_NONE = np.zeros(0, dtype=np.int64)
# In numbers. Arrays start at multiples of 16 bytes, because Triton compiles another kernel for unaligned pointers.
_ALIGNED = 4


@dataclass(frozen=True)
class PromptRows:
    """Rows with too many queries for query groups; the prefill kernel computes them."""

    tiles: QueryTiles
    tables_RB: Tensor
    contexts_R: Tensor
    # contexts_R on the host.
    context_lens: list[int]
    query_lens: list[int]


@dataclass(frozen=True)
class DeviceBatch:
    """Device copy of a Batch without adapters; ModelRunner rejects rows with adapters.

    All tensors are int32 on the device. Values derived from them are never copied back to the host.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    # Negative: the token's KV is not stored.
    slots_T: Tensor
    # None: logits of all tokens are needed.
    logits_rows: Tensor | None
    # Groups of the rows that are not in `prompts`.
    query_groups: QueryGroups | None
    prompts: PromptRows | None
    # None: no position is scored.
    scored_rows: Tensor | None = None
    # The same step with the slots and tables of layers with a window; None: no layer frees blocks.
    windowed: DeviceBatch | None = None

    @classmethod
    def of(
        cls, batch: Batch, device: torch.device, *, most_queries: int = 1, windowed: Batch | None = None
    ) -> DeviceBatch:
        """Start the copy without waiting for it.

        most_queries: maximum queries per group. windowed: the batch in layers with a window; see `Batch.in_windows`.
        """
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
                *((windowed.slots, windowed.block_tables[rows_U], windowed.block_tables[several]) if windowed else ()),
            ],
            device,
        )
        if device_tokens:
            token_ids[places] = device_tokens.token_ids[sources].clamp_min(0)
        if windowed:
            *more, window_slots, group_tables, row_tables = more
        *of_query_groups, rows, begins_in_row, begins, lengths, tables, contexts = more
        longest = int(batch.context_lens[few].max(initial=0))
        tiles = QueryTiles(rows, begins_in_row, begins, lengths)
        on_device = cls(
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
        return on_device.with_windows(window_slots, group_tables, row_tables) if windowed else on_device

    def with_windows(self, slots_T: Tensor, tables_UB: Tensor, tables_RB: Tensor | None = None) -> DeviceBatch:
        """Return the batch with its slots and tables in layers with a window. tables_RB: those of rows in `prompts`."""
        groups, prompts = self.query_groups, self.prompts
        if prompts is not None:
            assert tables_RB is not None, "the prompts have no tables in layers with a window"
            prompts = replace(prompts, tables_RB=tables_RB)
        groups = groups and replace(groups, tables_UB=tables_UB)
        windowed = replace(self, slots_T=slots_T, query_groups=groups, prompts=prompts)
        return replace(self, windowed=windowed)


def upload(arrays: Seq[Ints | NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy integer arrays to the device as int32 in one transfer, each in its own shape.

    Returns before a GPU has received them.
    """
    device_streams = streams.streams_of(device)
    sizes = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays]
    host = device_streams.page_locked(sum(sizes), torch.int32)
    numbers = host.numpy()
    for array, end, size in zip(arrays, np.cumsum(sizes).tolist(), sizes, strict=True):
        numbers[end - size : end - size + array.size] = array.ravel()
    parts = torch.split(device_streams.upload(host), sizes)
    return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]
