"""Rows of the last step as rank 0 sees them, so that the next step is sent as a difference."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import chain
from types import MappingProxyType

import numpy as np

from engine.batch.batch import Batch, DeviceTokens, KeptRows
from engine.batch.rows import Ints, RowChanges, num_blocks
from engine.scheduler.next_tokens import NextTokens
from engine.scheduler.prompt_scoring import ScoredRow
from engine.scheduler.sequence import Sequence

_NONE = np.zeros(0, dtype=np.int64)


class LastRows:
    """State of the last step's rows. Owned by the step thread, which passes every step that has rows."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._kept = KeptRows(block_size)
        self._sequences: list[Sequence] = []
        self._tables: list[list[int]] = []  # the sequences' lists, which only grow at the end

    def changes(
        self,
        sequences: list[Sequence],
        num_tokens: Seq[int],
        scored: Seq[ScoredRow] = (),
        drafts: Mapping[int, Seq[int]] = MappingProxyType({}),
        state_writes: Seq[tuple[int, int, int]] = (),
    ) -> RowChanges:
        """Return the difference from the last step to one in which each sequence computes its next `num_tokens` tokens.

        drafts: further tokens by row; all positions from the last own token on get logits. state_writes: see
        RowChanges.
        """
        starts = np.array([one.num_computed + one.sampling_row.num_in_flight for one in sequences])
        tables = [sequence.blocks for sequence in sequences]
        kept = self._places(sequences, tables, starts)
        self._sequences, self._tables = sequences, tables
        is_new, lens = kept < 0, np.array(num_tokens)
        for row, tokens in drafts.items():
            lens[row] += len(tokens)
        ends, num_added = self._kept.ends_of(kept, starts[is_new], lens)
        counts = num_blocks(ends, self._block_size)
        growing = np.flatnonzero(num_added)
        added = [tables[row][counts[row] - num_added[row] : counts[row]] for row in growing.tolist()]
        assert sum(map(len, added)) == num_added.sum(), "a row has no block for its tokens"
        return RowChanges(
            number=self._kept.number + 1,
            kept=kept,
            query_lens=lens,
            num_logits=_num_logits(sequences, ends, drafts),
            starts=starts[is_new],
            adapters=np.array([sequences[row].adapter for row in np.flatnonzero(is_new)], dtype=np.int64),
            state_indices=np.array([sequences[row].state_index for row in np.flatnonzero(is_new)], dtype=np.int64),
            token_ids=np.array(_tokens(sequences, num_tokens, drafts)),
            blocks=np.array(list(chain.from_iterable(added)), dtype=np.int64),
            scored=np.array([(one.row, len(one.next_tokens)) for one in scored], dtype=np.int64).reshape(-1, 2),
            state_writes=np.array(state_writes, dtype=np.int64).reshape(-1, 3),
        )

    def next_tokens(self, planned: NextTokens) -> RowChanges | None:
        """Return the difference from the last step to a pure decode step.

        None unless it adds exactly one token to every row of the last step.
        """
        rows = planned.rows
        tables = [sequence.blocks for sequence in rows.sequences]
        if rows.sequences != self._sequences or tables != self._tables or not self._kept.end_before(planned.ends_R):
            return None
        return RowChanges(
            number=self._kept.number + 1,
            kept=rows.numbers_R,
            query_lens=rows.ones_R,
            num_logits=rows.ones_R,
            starts=_NONE,
            adapters=_NONE,
            state_indices=_NONE,
            token_ids=planned.token_ids(),
            blocks=np.array([tables[row][place] for row, place in planned.first_of_blocks], dtype=np.int64),
        )

    def apply(self, changes: RowChanges, device_tokens: DeviceTokens | None = None) -> Batch:
        """Apply the difference and return the step's batch."""
        return self._kept.apply(changes, device_tokens)

    def _places(self, sequences: list[Sequence], tables: list[list[int]], starts: Ints) -> Ints:
        """Return the row of the last step that each sequence continues; -1 if it is new or has moved."""
        kept = np.arange(len(sequences))
        if sequences != self._sequences or tables != self._tables:
            place_of = {sequence: place for place, sequence in enumerate(self._sequences)}
            places = [place_of.get(sequence, -1) for sequence in sequences]
            known = [*self._tables, None]
            kept = np.array([p if known[p] is table else -1 for p, table in zip(places, tables, strict=True)])
        # A row whose draft was rejected in part is sent in full, which also sends its new state slot.
        is_behind = kept >= 0
        is_behind[is_behind] = self._kept.ends[kept[is_behind]] == starts[is_behind]
        return np.where(is_behind, kept, -1)


def _num_logits(sequences: list[Sequence], ends: Ints, drafts: Mapping[int, Seq[int]]) -> Ints:
    wanted: Ints = (ends == [len(one.tokens) + one.sampling_row.num_in_flight for one in sequences]).astype(np.int64)
    for row, tokens in drafts.items():
        wanted[row] = 1 + len(tokens)
    return wanted


def _tokens(sequences: list[Sequence], num_tokens: Seq[int], drafts: Mapping[int, Seq[int]]) -> list[int]:
    """Return the tokens to compute, row by row; 0 for a token in flight."""
    # The usual case: one token per row.
    if len(num_tokens) == sum(num_tokens) and not drafts:
        return [0 if one.sampling_row.num_in_flight else one.tokens[one.num_computed] for one in sequences]
    tokens: list[int] = []
    for row, (sequence, count) in enumerate(zip(sequences, num_tokens, strict=True)):
        start = sequence.num_computed
        if sequence.num_in_flight:
            tokens.append(0)
        elif count == 1:
            tokens.append(sequence.tokens[start])
        else:
            tokens += sequence.tokens[start : start + count]
        tokens += drafts.get(row, ())
    return tokens
