"""One step's work, as every rank of a replica sees it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.batch.rows import Ints, Row, RowChanges, num_blocks

# T tokens of this step, R sequences (rows), B blocks of the longest context

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class DeviceTokens:
    """Tokens of a step that the one before it chooses, perhaps at this moment: they go from there to here on the
    device."""

    token_ids: Any  # (S,) all that that step chooses, where it does; below 0 where there is none: that row has failed
    sources: Ints  # (F,) which of these
    places: Ints  # (F,) in T; what the batch's own `token_ids` say there means nothing

    def fill(self, token_ids_T: Ints) -> None:
        """Where a step is over when it was launched, the host has them."""
        token_ids_T[self.places] = np.maximum(np.asarray(self.token_ids)[self.sources], 0)

    @property
    def is_in_place(self) -> bool:
        """The first tokens that are chosen, in their order, are the first of this step, and no others are fed."""
        in_place = np.arange(len(self.sources))
        return bool((self.sources == in_place).all() and (self.places == in_place).all())


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows of one step, flattened. All arrays are int64, on the host, and good until the next step."""

    token_ids: Ints  # (T,)
    positions: Ints  # (T,)
    slots: Ints  # (T,) where each token's KV goes: block id * block_size + offset
    query_lens: Ints  # (R,) tokens of each row; they sum to T
    context_lens: Ints  # (R,) tokens each row attends to in the end: its `end`
    block_tables: Ints  # (R, B) padded with 0; columns of an array that may be wider
    adapters: Ints  # (R,)
    num_logits: Ints  # (R,) of so many last positions of each the logits are wanted
    logits_rows: Ints  # indices into T of these positions, row by row
    scored_rows: Ints  # and of those whose logits are wanted in slices: see engine.scheduler.prompt_scoring
    number: int  # of the step
    device_tokens: DeviceTokens | None = None
    new_cells: tuple[Ints, Ints] | None  # of block_tables, since the step before; None: its rows lay elsewhere

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def wants_all_logits(self) -> bool:
        """Those of every token."""
        return len(self.logits_rows) == len(self.token_ids)

    @classmethod
    def of(cls, rows: Seq[Row], *, block_size: int) -> Batch:
        """Flatten `rows`, in order."""
        return KeptRows(block_size).apply(RowChanges.of(rows, block_size=block_size))

    @classmethod
    def of_next_tokens(cls, tables_RB: Ints, positions_R: Ints, *, block_size: int) -> Batch:
        """One token of each of some rows, whose logits are wanted. Which tokens they are is not said."""
        rows = np.arange(len(positions_R))
        return cls(
            token_ids=np.zeros_like(positions_R),
            positions=positions_R,
            slots=tables_RB[rows, positions_R // block_size] * block_size + positions_R % block_size,
            query_lens=np.ones_like(positions_R),
            context_lens=positions_R + 1,
            block_tables=tables_RB,
            adapters=np.zeros_like(positions_R),
            num_logits=np.ones_like(positions_R),
            logits_rows=rows,
            scored_rows=_NONE,
            number=0,
            new_cells=None,
        )


class KeptRows:
    """The rows of the last step, on every rank of a replica: what the next one's changes are changes of. Their block
    tables are kept, and change in place."""

    def __init__(self, block_size: int) -> None:
        self.number = 0  # of the last step
        self._block_size = block_size
        self._ends_R = np.zeros(0, dtype=np.int64)
        self._adapters_R = np.zeros(0, dtype=np.int64)
        self._tables_RB = np.zeros((0, 1), dtype=np.int64)  # padded with 0

    def __len__(self) -> int:
        return len(self._ends_R)

    @property
    def ends(self) -> Ints:
        """(R,) of the rows of the last step."""
        return self._ends_R

    def ends_of(self, kept: Ints, starts: Ints, query_lens: Ints) -> tuple[Ints, Ints]:
        """Where each row of the next step ends, and how many blocks its table gets: (R,) each. See RowChanges."""
        is_new = kept < 0
        starts_R = np.append(self._ends_R, 0)[kept]
        held_R = num_blocks(starts_R, self._block_size)
        if len(starts):
            starts_R[is_new], held_R[is_new] = starts, 0
        ends_R = starts_R + query_lens
        return ends_R, num_blocks(ends_R, self._block_size) - held_R

    def end_before(self, ends: Ints) -> bool:
        """Every row of the last step has ended one position before this."""
        return len(ends) == len(self) and bool((self._ends_R + 1 == ends).all())

    def apply(self, changes: RowChanges, device_tokens: DeviceTokens | None = None) -> Batch:
        """The batch of the next step. While its rows stay where they are, so does the array of their block tables."""
        if batch := self._next(changes, device_tokens):  # mostly
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
        assert (num_logits <= query_lens).all(), "logits of a position that is not computed"
        if len(changes.token_ids) == len(rows):  # mostly
            row_of_T, positions, logits_rows = rows, ends - 1, np.flatnonzero(num_logits)
        else:
            last = np.cumsum(query_lens)  # in the batch; the token before it is the row's last
            row_of_T = np.repeat(rows, query_lens)
            positions = np.arange(len(changes.token_ids)) + np.repeat(ends - last, query_lens)
            skipped = last - np.cumsum(num_logits)  # up to each row's end, positions without logits
            logits_rows = np.repeat(skipped, num_logits) + np.arange(num_logits.sum())
        return Batch(
            token_ids=changes.token_ids,
            positions=positions,
            slots=tables[row_of_T, positions // size] * size + positions % size,
            query_lens=query_lens,
            context_lens=ends,
            block_tables=tables[:, :width],
            adapters=self._adapters_R,
            num_logits=num_logits,
            logits_rows=logits_rows,
            scored_rows=_scored_rows(changes, begins=np.cumsum(query_lens) - query_lens)
            if len(changes.scored)
            else _NONE,
            number=changes.number,
            device_tokens=device_tokens,
            new_cells=new_cells if stays else None,
        )

    def _next(self, changes: RowChanges, device_tokens: DeviceTokens | None) -> Batch | None:
        """What `apply` returns where every row goes on by one token whose logits are wanted, and stays in its place;
        None: it is not so, or there is no room for its blocks yet."""
        positions, tables, num_rows = self._ends_R, self._tables_RB, len(self)
        if not len(changes.kept) == len(changes.token_ids) == np.count_nonzero(changes.num_logits) == num_rows:
            return None
        rows = np.arange(num_rows)
        if len(changes.starts) or len(changes.scored) or np.count_nonzero(changes.kept == rows) < num_rows:
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
            num_logits=changes.num_logits,
            logits_rows=rows,
            scored_rows=_NONE,
            number=changes.number,
            device_tokens=device_tokens,
            new_cells=new_cells,
        )

    def _keep(self, changes: RowChanges, *, width: int) -> bool:
        """Put the rows that go on where they belong now, and make room for the new ones and for so many blocks. True if
        all are where they were."""
        kept, tables = changes.kept, self._tables_RB
        is_same = len(kept) == len(tables) and bool((kept == np.arange(len(kept))).all())
        if is_same and width <= tables.shape[1]:
            return True
        goes_on = np.flatnonzero(kept >= 0)
        room = 1 << (width - 1).bit_length()
        shared = min(room, tables.shape[1])
        self._tables_RB = np.zeros((len(kept), room), dtype=np.int64)
        self._tables_RB[goes_on, :shared] = tables[kept[goes_on], :shared]
        adapters = np.zeros(len(kept), dtype=np.int64)
        adapters[goes_on], adapters[kept < 0] = self._adapters_R[kept[goes_on]], changes.adapters
        self._adapters_R = adapters
        return False


def _scored_rows(changes: RowChanges, *, begins: Ints) -> Ints:
    """begins: of each row, in T."""
    rows, counts = changes.scored.T
    assert (counts <= changes.query_lens[rows]).all(), "logits of a position that is not computed"
    ends = np.cumsum(counts)
    within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    scored: Ints = np.repeat(begins[rows], counts) + within
    return scored
