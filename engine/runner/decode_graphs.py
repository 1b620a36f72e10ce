"""CUDA graphs of decode steps.

At batch sizes where a step is bound by reading weights, launching hundreds of kernels from Python takes longer than the
kernels. A graph launches the same kernels over the same addresses again, so varying inputs lie in static buffers:

    Batch ──one copy──> device ──two copies──> static inputs ──replay──> static logits      (and the pool)

Block tables stay in place between steps: while the rows are the same, only new cells are copied.

Shapes are part of a graph, so there is one graph for each of a few numbers of tokens, and a batch is padded to the
next. A padding token belongs to a query group with context 0, whose attention result is zero. Its slot is -1, so its KV
is not stored and padding needs no block.

Rows are cut into query groups (engine/kernels/attention/queries.py), at most one per token: a decoding row is one
group; a row with a draft, or a short chunk of a prompt, is several. A layer stores all tokens' keys before any token
attends to the keys up to its own. Each group reads its row's keys again, so only few rows may have several groups.

With recurrent layers, each row has one token. The slots of the rows' states are static inputs, too; a padding token has
slot -1: it reads zeros and writes no state.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.batch import Batch, DeviceTokens
from engine.batch.device_batch import DeviceBatch, upload
from engine.batch.rows import Ints, slots_in_windows
from engine.kernels.attention.queries import QueryGroups, QueryGroupSizes, cut_query_groups
from engine.kernels.recurrent.state_slots import StateSlots

# R rows of a batch, T its tokens, U its query groups, N tokens and query groups of a graph, M those of the largest
# graph, B blocks of the longest table, V vocabulary

# Above this size computing takes longer than launching.
_MOST_ROWS = 256
# Rows of the static input: four per token, then three per query group, then one per token in layers with a window.
_ID, _POSITION, _SLOT, _SEAT, _FIRST, _COUNT, _CONTEXT, _WINDOW_SLOT = range(8)
_ABSENT = np.array([[0], [0], [-1], [0], [0], [1], [0], [-1]], dtype=np.int32)  # padding

Step = Callable[[], None]


class Capture(Protocol):
    """Recorder of a step's launches."""

    def __call__(self, step: Step) -> Step:
        """Return a callable that repeats everything that `step` launches, without calling `step`."""
        ...


class CudaCapture:
    """Capture as CUDA graphs. One graph runs at a time, so all share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                step()  # kernels are compiled and workspaces allocated here, which cannot be recorded
            # Other threads of the worker use the device at the same time, which would break a recording in any other
            # mode.
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                step()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


class DecodeGraphs:
    """Recorded steps of one model over one pool. Owned by the step thread."""

    def __init__(
        self,
        compute: Callable[[DeviceBatch, StateSlots | None], Tensor],
        capture: Capture,
        *,
        max_rows: int,
        has_states: bool = False,
        num_sizes: int | None = None,
        max_context: int,
        max_read_again: int,
        most_queries: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        window_of: Ints | None = None,
    ) -> None:
        """Record a step of each size with padding tokens only, which neither read nor write the pool.

        compute: from N tokens to their logits (N, V); its launches may depend only on shapes and `longest`. has_states:
        the model has recurrent layers. num_sizes: record only that many of the largest sizes. most_queries: queries per
        group. max_read_again: limit of the positions that a batch's groups read again, beyond one read per row.
        window_of: see KVPool.
        """
        self._sizes = graph_sizes(max_rows)[-(num_sizes or 0) :]
        self._compute = compute
        self._device = device
        self._longest = max_context
        self._max_read_again = max_read_again
        self._most_queries = most_queries
        largest = self._sizes[-1]
        self._window_of, self._block_size = window_of, block_size
        self._absent = _ABSENT if window_of is not None else _ABSENT[:_WINDOW_SLOT]
        self._numbers_7M = torch.from_numpy(self._absent).to(device).repeat(1, largest)
        self._tokens_M = torch.arange(largest, dtype=torch.int32, device=device)
        self._tables_MB = torch.zeros(largest, -(-max_context // block_size), dtype=torch.int32, device=device)
        # Of recurrent layers: where a token's state is read and written.
        self._states_2M: Tensor | None = None
        if has_states:
            self._states_2M = torch.full((2, largest), -1, dtype=torch.int64, device=device)
            self._starts_M1 = torch.arange(largest + 1, dtype=torch.int64, device=device)
        # In layers with a window.
        self._window_tables_MB = None if window_of is None else torch.zeros_like(self._tables_MB)
        self._last: tuple[int, Any] = (0, None)  # number of the step whose block tables are in place, and the tables
        self._logits_MV = torch.zeros(largest, vocab_size, dtype=torch.float32, device=device)
        # Largest first: the other graphs reuse its memory.
        self._replays = {size: capture(partial(self._step, size)) for size in reversed(self._sizes)}

    def __call__(self, batch: Batch) -> Tensor | None:
        """Return the requested logits (R, V) fp32, which the next call overwrites.

        None if no graph fits the batch: it has more tokens or longer tables than any graph, its groups would read too
        much again, it scores prompt tokens, or it has states and rows of several tokens.
        """
        num_tokens, width = batch.num_tokens, batch.block_tables.shape[1]
        if num_tokens > self._sizes[-1] or width > self._tables_MB.shape[1] or len(batch.scored_rows):
            return None
        if self._states_2M is not None and (num_tokens > len(batch.query_lens) or len(batch.state_writes)):
            return None
        query_groups = None if num_tokens == len(batch.query_lens) else self._cut(batch)
        if (
            query_groups is not None
            and int(query_groups.contexts_U.sum() - batch.context_lens.sum()) > self._max_read_again
        ):
            return None
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        more = [] if self._states_2M is None else [states_of_rows(batch, size)]
        more += [] if batch.wants_all_logits else [batch.logits_rows]
        numbers, *uploaded = self._upload_tables(batch, [self._numbers(batch, query_groups, size), *more], query_groups)
        self._numbers_7M[:, :size].copy_(numbers)
        if self._states_2M is not None:
            self._states_2M[:, :size].copy_(uploaded[0])
        if batch.device_tokens:
            self._copy_device_tokens(batch.device_tokens)
        self._replays[size]()
        return self._logits_MV[:num_tokens] if batch.wants_all_logits else self._logits_MV.index_select(0, uploaded[-1])

    @property
    def token_ids_M(self) -> Tensor:
        """Token ids of the last step, on the device, padded. The next call overwrites them."""
        return self._numbers_7M[_ID]

    def _cut(self, batch: Batch) -> QueryGroupSizes:
        return cut_query_groups(batch.query_lens, batch.context_lens, most=self._most_queries)

    def _numbers(self, batch: Batch, query_groups: QueryGroupSizes | None, size: int) -> NDArray[np.int32]:
        """Return the static input, (7, N) or with windows (8, N); see _ID. query_groups: None if each token is one."""
        num_tokens, numbers_7N = batch.num_tokens, np.repeat(self._absent, size, axis=1)
        numbers_7N[: _SLOT + 1, :num_tokens] = batch.token_ids, batch.positions, batch.slots
        if self._window_of is not None:
            window_slots = slots_in_windows(batch.slots, self._window_of, self._block_size)
            numbers_7N[_WINDOW_SLOT, :num_tokens] = window_slots
        if query_groups is None:
            tokens = np.arange(num_tokens)
            numbers_7N[_SEAT, :num_tokens] = tokens * self._most_queries
            numbers_7N[_FIRST, :num_tokens], numbers_7N[_CONTEXT, :num_tokens] = tokens, batch.positions + 1
            num_query_groups = num_tokens
        else:
            num_query_groups = len(query_groups.counts_U)
            numbers_7N[_SEAT, :num_tokens] = query_groups.seats_N(self._most_queries)
            numbers_7N[_FIRST, :num_query_groups] = np.cumsum(query_groups.counts_U) - query_groups.counts_U
            numbers_7N[_COUNT, :num_query_groups], numbers_7N[_CONTEXT, :num_query_groups] = (
                query_groups.counts_U,
                query_groups.contexts_U,
            )
        numbers_7N[_SEAT, num_tokens:] = num_query_groups * self._most_queries  # a padding group
        return numbers_7N

    def _upload_tables(self, batch: Batch, arrays: list[Any], query_groups: QueryGroupSizes | None) -> list[Tensor]:
        """Update the static block tables, one per query group. arrays: uploaded in the same copy and returned."""
        tables_RB, count = batch.block_tables, len(arrays)
        num_tokens, width = batch.num_tokens, tables_RB.shape[1]
        static = [self._tables_MB, *([] if self._window_tables_MB is None else [self._window_tables_MB])]
        if query_groups is not None:
            uploaded = upload([*arrays, query_groups.rows_U, *self._with_parts(tables_RB)], self._device)
            for static_MB, table_RB in zip(static, uploaded[count + 1 :], strict=True):
                static_MB[: len(query_groups.rows_U), :width].copy_(table_RB.index_select(0, uploaded[count]))
            self._last = 0, None
            return uploaded[:count]
        if batch.new_cells is not None and self._is_next(batch):
            new_blocks = tables_RB[batch.new_cells]
            uploaded = upload([*arrays, *batch.new_cells, *self._with_parts(new_blocks)], self._device)
            if len(new_blocks):
                lines, columns, *blocks = uploaded[count:]
                for static_MB, block in zip(static, blocks, strict=True):
                    static_MB[lines, columns] = block
        else:
            uploaded = upload([*arrays, *self._with_parts(tables_RB)], self._device)
            for static_MB, table_RB in zip(static, uploaded[count:], strict=True):
                static_MB[:num_tokens, :width].copy_(table_RB)
        self._last = batch.number, tables_RB.base
        return uploaded[:count]

    def _with_parts(self, blocks: Ints) -> list[Ints]:
        """Return the blocks, and their parts in layers with a window if the pool has any."""
        return [blocks] if self._window_of is None else [blocks, self._window_of[blocks]]

    def _copy_device_tokens(self, device_tokens: DeviceTokens) -> None:
        """Copy the tokens that the previous step chooses into the static input."""
        tokens_M = self._numbers_7M[_ID]
        if device_tokens.is_in_place:
            num_device_tokens = len(device_tokens.sources)
            torch.clamp(device_tokens.token_ids[:num_device_tokens], min=0, out=tokens_M[:num_device_tokens])
        else:
            sources, places = upload([device_tokens.sources, device_tokens.places], self._device)
            tokens_M[places] = device_tokens.token_ids[sources].clamp_min(0)

    def _is_next(self, batch: Batch) -> bool:
        """Return True if the static buffers hold the block tables of the step directly before, in the same rows."""
        number, tables = self._last
        return batch.number == number + 1 and batch.block_tables.base is tables

    def _step(self, size: int) -> None:
        """Compute one step on the static buffers; this is recorded."""
        token_ids, positions, slots, seats, firsts, counts, contexts, *more = self._numbers_7M[:, :size].unbind()
        query_groups = QueryGroups(
            firsts,
            counts,
            self._tables_MB[:size],
            contexts,
            self._tokens_M[:size],
            seats,
            most=self._most_queries,
            longest=self._longest,
        )
        batch = DeviceBatch(token_ids, positions, slots, logits_rows=None, query_groups=query_groups, prompts=None)
        state_slots = None
        if self._states_2M is not None:
            read_N, write_N = self._states_2M[:, :size].unbind()
            state_slots = StateSlots(self._starts_M1[: size + 1], read_N, write_N, max_query_len=1)
        if self._window_tables_MB is not None:
            batch = batch.with_windows(more[0], self._window_tables_MB[:size])
        self._logits_MV[:size].copy_(self._compute(batch, state_slots))


def states_of_rows(batch: Batch, size: int) -> NDArray[np.int64]:
    """Return (2, N) slots to read and to write the states of rows with one token each: see StateSlots."""
    states_2N = np.full((2, size), -1)
    states_2N[:, : len(batch.state_indices)] = batch.state_indices
    states_2N[0, : len(batch.state_indices)][batch.context_lens == 1] = -1
    return states_2N


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, 16, 24, 32, … up to the first that holds max_rows, or _MOST_ROWS."""
    sizes = [1, 2, 4, *range(8, _MOST_ROWS + 1, 8)]
    return tuple(sizes[: bisect_left(sizes, max_rows) + 1])
