"""Input of one step, identical on every rank of a replica."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from engine.batch.rows import Ints, Row, RowChanges, num_blocks, slots_in_windows

# T tokens of this step, R sequences (rows), B blocks of the longest context

_NONE = np.zeros(0, dtype=np.int64)
_NO_WRITES = np.zeros((0, 2), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class DeviceTokens:
    """Input tokens that the previous step samples, copied on the device without a round trip to the host."""

    # (S,) all tokens that the previous step samples, on its device; negative where that row has failed.
    token_ids: Any
    # (F,) indices into token_ids.
    sources: Ints
    # (F,) indices into T; the batch's own `token_ids` are placeholders there.
    places: Ints

    def fill(self, token_ids_T: Ints) -> None:
        """Fill in the tokens on the host, for a previous step that was complete at launch."""
        token_ids_T[self.places] = np.maximum(np.asarray(self.token_ids)[self.sources], 0)

    @property
    def is_in_place(self) -> bool:
        """True if the sampled tokens are this step's first tokens in the same order, and no others are used."""
        in_place = np.arange(len(self.sources))
        return bool((self.sources == in_place).all() and (self.places == in_place).all())


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of one step, flattened. All arrays are int64, on the host, and valid until the next step."""

    token_ids: Ints  # (T,)
    positions: Ints  # (T,)
    # (T,) KV slot of each token: block id * block_size + offset.
    slots: Ints
    # (R,) tokens of each row; they sum to T.
    query_lens: Ints
    # (R,) tokens that the row's last token attends to: its `end`.
    context_lens: Ints
    # (R, B) padded with 0; may be a view of a wider array.
    block_tables: Ints
    adapters: Ints  # (R,)
    state_indices: Ints  # (R,) of state slots in the pool
    # (W, 2) index into T, and the state slot to which the state after this token is written.
    state_writes: Ints = field(default_factory=lambda: _NO_WRITES)
    # (R,) number of last positions of each row whose logits are needed.
    num_logits: Ints
    # Indices into T of these positions, row by row.
    logits_rows: Ints
    # Indices into T of the positions whose logits are computed in slices; see engine.scheduler.prompt_scoring.
    scored_rows: Ints
    # Number of the step.
    number: int
    device_tokens: DeviceTokens | None = None
    # Cells of block_tables that changed since the previous step; None if its rows were laid out differently.
    new_cells: tuple[Ints, Ints] | None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def num_drafted(self) -> int:
        """Number of draft tokens. Only drafted rows need the logits of several positions."""
        return len(self.logits_rows) - int(np.count_nonzero(self.num_logits))

    @property
    def wants_all_logits(self) -> bool:
        """True if the logits of every token are needed."""
        return len(self.logits_rows) == len(self.token_ids)

    def in_windows(self, window_of: Ints, block_size: int) -> Batch:
        """Return the batch with the slots and tables of layers with a window; see KVPool.window_of."""
        return replace(
            self,
            slots=slots_in_windows(self.slots, window_of, block_size),
            block_tables=window_of[self.block_tables],
            new_cells=None,
        )

    @classmethod
    def of(cls, rows: Seq[Row], *, block_size: int) -> Batch:
        """Flatten `rows` in order."""
        return KeptRows(block_size).apply(RowChanges.of(rows, block_size=block_size))

    @classmethod
    def of_next_tokens(cls, tables_RB: Ints, positions_R: Ints, *, block_size: int) -> Batch:
        """Build a batch of one token per row, with logits. The token ids are placeholders."""
        rows = np.arange(len(positions_R))
        return cls(
            token_ids=np.zeros_like(positions_R),
            positions=positions_R,
            slots=tables_RB[rows, positions_R // block_size] * block_size + positions_R % block_size,
            query_lens=np.ones_like(positions_R),
            context_lens=positions_R + 1,
            block_tables=tables_RB,
            adapters=np.zeros_like(positions_R),
            state_indices=np.zeros_like(positions_R),
            num_logits=np.ones_like(positions_R),
            logits_rows=rows,
            scored_rows=_NONE,
            number=0,
            new_cells=None,
        )


class KeptRows:
    """Rows of the previous step, kept on every rank as the base that RowChanges apply to.

    The block tables are updated in place.
    """

    def __init__(self, block_size: int) -> None:
        # Number of the last step.
        self.number = 0
        self._block_size = block_size
        self._ends_R = np.zeros(0, dtype=np.int64)
        self._adapters_R = np.zeros(0, dtype=np.int64)
        self._state_indices_R = np.zeros(0, dtype=np.int64)
        self._tables_RB = np.zeros((0, 1), dtype=np.int64)  # padded with 0

    def __len__(self) -> int:
        return len(self._ends_R)

    @property
    def ends(self) -> Ints:
        """(R,) end position of each row of the last step."""
        return self._ends_R

    def ends_of(self, kept: Ints, starts: Ints, query_lens: Ints) -> tuple[Ints, Ints]:
        """Return the end positions of the next step's rows (R,), and the counts of their new blocks; see RowChanges."""
        is_new = kept < 0
        starts_R = np.append(self._ends_R, 0)[kept]
        held_R = num_blocks(starts_R, self._block_size)
        if len(starts):
            starts_R[is_new], held_R[is_new] = starts, 0
        ends_R = starts_R + query_lens
        return ends_R, num_blocks(ends_R, self._block_size) - held_R

    def end_before(self, ends: Ints) -> bool:
        """Return True if every row of the last step ended one position before `ends`."""
        return len(ends) == len(self) and bool((self._ends_R + 1 == ends).all())

    def apply(self, changes: RowChanges, device_tokens: DeviceTokens | None = None) -> Batch:
        """Return the next step's batch. The block-table array is reused while rows keep their places."""
        # Common case: every row continues by one token.
        if batch := self._next(changes, device_tokens):
            return batch
        query_lens, num_logits, size = changes.query_lens, changes.num_logits, self._block_size
        ends, num_added = self.ends_of(changes.kept, changes.starts, query_lens)
        counts = num_blocks(ends, size)
        width = int(counts.max())
        stays = self._keep(changes, width=width)
        self.number, self._ends_R, tables = changes.number, ends, self._tables_RB
        rows = np.arange(len(ends))
        new_cells = _NONE, _NONE
        if len(changes.blocks):
            columns = np.arange(len(changes.blocks)) + np.repeat(counts - np.cumsum(num_added), num_added)
            new_cells = np.repeat(rows, num_added), columns
            tables[new_cells] = changes.blocks
        assert (num_logits <= query_lens).all(), "num_logits exceeds query_lens"
        # Common case: one token per row.
        if len(changes.token_ids) == len(rows):
            row_of_T, positions, logits_rows = rows, ends - 1, np.flatnonzero(num_logits)
        else:
            # End of each row in the batch (exclusive).
            last = np.cumsum(query_lens)
            row_of_T = np.repeat(rows, query_lens)
            positions = np.arange(len(changes.token_ids)) + np.repeat(ends - last, query_lens)
            # Number of positions without logits, up to each row's end.
            skipped = last - np.cumsum(num_logits)
            logits_rows = np.repeat(skipped, num_logits) + np.arange(num_logits.sum())
        return Batch(
            token_ids=changes.token_ids,
            positions=positions,
            slots=tables[row_of_T, positions // size] * size + positions % size,
            query_lens=query_lens,
            context_lens=ends,
            block_tables=tables[:, :width],
            adapters=self._adapters_R,
            state_indices=self._state_indices_R,
            num_logits=num_logits,
            logits_rows=logits_rows,
            scored_rows=_scored_rows(changes, begins=np.cumsum(query_lens) - query_lens)
            if len(changes.scored)
            else _NONE,
            state_writes=_state_writes(changes) if len(changes.state_writes) else _NO_WRITES,
            number=changes.number,
            device_tokens=device_tokens,
            new_cells=new_cells if stays else None,
        )

    def _next(self, changes: RowChanges, device_tokens: DeviceTokens | None) -> Batch | None:
        """Return the batch if every row continues by one token with logits and keeps its place.

        Returns None otherwise, or if the table array is too narrow for the new blocks.
        """
        positions, tables, num_rows = self._ends_R, self._tables_RB, len(self)
        if not len(changes.kept) == len(changes.token_ids) == np.count_nonzero(changes.num_logits) == num_rows:
            return None
        rows = np.arange(num_rows)
        if (
            len(changes.starts)
            or len(changes.scored)
            or len(changes.state_writes)
            or np.count_nonzero(changes.kept == rows) < num_rows
        ):
            return None
        blocks, in_block = np.divmod(positions, self._block_size)
        width = int(blocks.max()) + 1
        if width > tables.shape[1]:
            return None
        new_cells = _NONE, _NONE
        if len(changes.blocks):
            beginning = np.flatnonzero(in_block == 0)
            new_cells = beginning, blocks[beginning]
            tables[new_cells] = changes.blocks
        self.number, self._ends_R = changes.number, positions + 1
        return Batch(
            token_ids=changes.token_ids,
            positions=positions,
            slots=tables[rows, blocks] * self._block_size + in_block,
            query_lens=changes.query_lens,
            context_lens=self._ends_R,
            block_tables=tables[:, :width],
            adapters=self._adapters_R,
            state_indices=self._state_indices_R,
            num_logits=changes.num_logits,
            logits_rows=rows,
            scored_rows=_NONE,
            number=changes.number,
            device_tokens=device_tokens,
            new_cells=new_cells,
        )

    def _keep(self, changes: RowChanges, *, width: int) -> bool:
        """Move continuing rows to their new places, and make room for new rows and for `width` blocks.

        Returns True if no row moved.
        """
        kept, tables = changes.kept, self._tables_RB
        is_same = len(kept) == len(tables) and bool((kept == np.arange(len(kept))).all())
        if is_same and width <= tables.shape[1]:
            return True
        goes_on = np.flatnonzero(kept >= 0)
        room = 1 << (width - 1).bit_length()
        shared = min(room, tables.shape[1])
        self._tables_RB = np.zeros((len(kept), room), dtype=np.int64)
        self._tables_RB[goes_on, :shared] = tables[kept[goes_on], :shared]
        self._adapters_R = _moved(self._adapters_R, kept, changes.adapters)
        self._state_indices_R = _moved(self._state_indices_R, kept, changes.state_indices)
        return False


def _moved(numbers_R: Ints, kept: Ints, new: Ints) -> Ints:
    """Return one number per row of the next step: those of kept rows, and the new ones."""
    moved = np.zeros(len(kept), dtype=np.int64)
    moved[kept >= 0], moved[kept < 0] = numbers_R[kept[kept >= 0]], new
    return moved


def _state_writes(changes: RowChanges) -> Ints:
    """Return (W, 2) indices into T and state slots."""
    rows, offsets, slots = changes.state_writes.T
    begins = np.cumsum(changes.query_lens) - changes.query_lens
    return np.stack((begins[rows] + offsets, slots), axis=1)


def _scored_rows(changes: RowChanges, *, begins: Ints) -> Ints:
    """Return indices into T of the scored positions. begins: first token of each row, in T."""
    rows, counts = changes.scored.T
    assert (counts <= changes.query_lens[rows]).all(), "scored positions exceed query_lens"
    ends = np.cumsum(counts)
    within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    scored: Ints = np.repeat(begins[rows], counts) + within
    return scored
