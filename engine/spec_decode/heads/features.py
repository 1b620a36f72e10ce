"""Features of the positions that a sequence may continue from, by KV slot.

A sequence continues behind its last computed position: the last position of its row in the step, or, after a draft, any
position from its own last token on. The features of all such positions stay in a ring for some steps. If the layout
has room (EAGLE), the feature of a full block's last position is also stored in the pool, so that sequences can continue
after a cache hit, a lower tier, a fork or a transfer.

Resting heads pass positions over. Neither skipped positions nor any after them have features, which would be computed
from missing KV. Their slots are marked. The last position of a block gets a row of zeros instead, which no
real feature equals; it travels with the block, and in place of the feature when a sequence moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch.batch import Batch
from engine.batch.rows import Ints
from engine.kv.pool import KVPool
from engine.runner import streams
from engine.spec_decode.heads.head_row import HeadRow

# N rows, E width of a feature, C capacity of the ring

UNKNOWN = -1
# Bytes of a row that are checked for zeros.
_LOOKED_AT = 16


class Features:
    """Features of one rank; equal on all ranks. Owned by the step thread."""

    def __init__(self, pool: KVPool, *, dim: int, dtype: torch.dtype, capacity: int) -> None:
        """capacity: size of the ring, enough for a few steps."""
        self._pool = pool
        self._size = pool.layout.block_size
        self._of_blocks: Tensor | None = None
        # Warm-up runs in inference mode, but transfers write outside of it.
        with torch.inference_mode(False):
            self._ring_CE = torch.zeros(capacity, dim, dtype=dtype, device=pool.device)
            if pool.layout.feature_bytes:
                self._of_blocks = pool.features.view(dtype)
        self._slot_of_C = np.full(capacity, UNKNOWN)
        self._place_of = np.full(pool.num_blocks * self._size, UNKNOWN)  # latest place by slot
        self._next = 0
        # Heads on a GPU pass nothing over, and reading bytes there would wait for the device.
        self._begin_BN = pool.features.numpy()[:, :_LOOKED_AT] if pool.device.type == "cpu" else None
        self._is_over = bytearray(pool.num_blocks * self._size)  # by slot: passed over
        self._is_over_S = np.frombuffer(self._is_over, dtype=np.uint8)

    def keep(self, slots_N: Ints, x_NE: Tensor) -> None:
        """Keep the features of positions that sequences may continue from."""
        slots_N, x_NE = slots_N[-len(self._slot_of_C) :], x_NE[-len(self._slot_of_C) :]
        places_N = (self._next + np.arange(len(slots_N))) % len(self._slot_of_C)
        self._next = (self._next + len(slots_N)) % len(self._slot_of_C)
        self._slot_of_C[places_N] = slots_N
        self._place_of[slots_N] = places_N
        if len(places_N) and places_N[0] <= places_N[-1]:
            self._ring_CE[int(places_N[0]) : int(places_N[-1]) + 1] = x_NE
        else:
            self._ring_CE[self._on_device(places_N)] = x_NE

    def keep_ends(self, slots_T: Ints, x_TE: Tensor) -> None:
        """Store the features of a step's positions that are the last of their blocks."""
        ends = np.flatnonzero(slots_T % self._size == self._size - 1)
        if self._of_blocks is not None and len(ends):
            blocks_N = self._on_device(slots_T[ends] // self._size)
            self._of_blocks[blocks_N] = x_TE[self._on_device(ends)]

    def pass_over(self, slots: Iterable[int]) -> None:
        last = self._size - 1
        for slot in slots:
            self._is_over[slot] = True
            if self._of_blocks is not None and slot % self._size == last:
                self._of_blocks[slot // self._size] = 0

    def clear_passed_over(self, slots_N: Ints | int) -> None:
        """Clear the marks of these slots, which belong to the previous owner of the blocks."""
        self._is_over_S[slots_N] = False

    def is_passed_over(self, slot: int) -> bool:
        """Return True if the computed position at this slot was passed over."""
        if self._of_blocks is not None and self._begin_BN is not None and slot % self._size == self._size - 1:
            return not self._begin_BN[slot // self._size].any()
        return bool(self._is_over[slot])

    def places(self, slots: Iterable[int]) -> list[int]:
        """Return where the feature of each slot is, for `read`; UNKNOWN if there is none."""
        return [self._place(slot) for slot in slots]

    def before(self, rows: Sequence[HeadRow]) -> tuple[list[int], Tensor]:
        """Return the rows that have a feature before their last token, and these features (N, E)."""
        places = self.places(self.slots_before(rows))
        known = [row for row, place in enumerate(places) if place != UNKNOWN]
        return known, self.read([places[row] for row in known])

    def knows(self, rows: Sequence[HeadRow], is_in_flight: Callable[[int], bool] = lambda slot: False) -> bool:
        """Return True if each row has a feature before its last token, or will get one: is_in_flight(slot)."""
        return all(is_in_flight(slot) or self._place(slot) != UNKNOWN for slot in self.slots_before(rows))

    def _place(self, slot: int) -> int:
        """Return the place of one slot. Uses little numpy, whose code is out of cache between steps."""
        if slot == UNKNOWN or self.is_passed_over(slot):
            return UNKNOWN
        # Prefer the block's feature; the one in the ring may be older.
        if self._of_blocks is not None and slot % self._size == self._size - 1:
            return len(self._slot_of_C) + slot // self._size
        place = int(self._place_of[slot])
        return place if place >= 0 and int(self._slot_of_C[place]) == slot else UNKNOWN

    def read(self, places: Sequence[int]) -> Tensor:
        """Return a copy of the features, (N, E); zeros for UNKNOWN."""
        capacity = len(self._slot_of_C)
        in_ring = [row for row, place in enumerate(places) if 0 <= place < capacity]
        if len(in_ring) == len(places):
            return self._ring_CE[self._on_device(places)]
        x_NE = torch.zeros(len(places), self._ring_CE.shape[1], dtype=self._ring_CE.dtype, device=self._pool.device)
        x_NE[self._on_device(in_ring)] = self._ring_CE[self._on_device([places[row] for row in in_ring])]
        if in_blocks := [row for row, place in enumerate(places) if place >= capacity]:
            assert self._of_blocks is not None
            blocks = self._on_device([places[row] - capacity for row in in_blocks])
            x_NE[self._on_device(in_blocks)] = self._of_blocks[blocks]
        return x_NE

    def take_copy(self, source: int, target: int) -> None:
        """Copy the features of a block that was copied for a fork."""
        offsets = np.arange(self._size)
        places = self._place_of[source * self._size + offsets]
        is_there = (places >= 0) & (self._slot_of_C[places] == source * self._size + offsets)
        rows_NE = self._ring_CE[self._on_device(places[is_there])].clone()
        self.keep(target * self._size + offsets[is_there], rows_NE)
        self._is_over_S[target * self._size + offsets] = self._is_over_S[source * self._size + offsets]

    def of(self, blocks: Sequence[int], num_tokens: int) -> bytes:
        """Return the feature of the last of `num_tokens` positions of a block table, as sent with its KV.

        Returns zeros for a passed-over position, and b"" if there is no feature (yet).
        """
        slots = self._slots(blocks, num_tokens - 1, num_tokens)
        if len(slots) and self.is_passed_over(int(slots[0])):
            return bytes(self._ring_CE[0].nbytes)
        places = self.places(slots.tolist())
        return b"" if UNKNOWN in places else self.read(places).view(torch.uint8).cpu().numpy().tobytes()

    def arrived(self, blocks: Sequence[int], first_token: int, end_token: int, last: bytes) -> None:
        """Record KV of positions [first_token, end_token) that a transfer wrote to this block table.

        The range may be empty. The features of full blocks came with the KV. last: the sender's `of` for end_token.
        Discards what the ring has for these slots, which belongs to the previous owner of the blocks.
        """
        slots = self._slots(blocks, min(first_token, end_token - 1), end_token)
        self._place_of[slots], self._is_over_S[slots] = UNKNOWN, False
        if not end_token or len(last) != self._ring_CE[0].nbytes:
            return
        if not any(last):
            self._is_over_S[slots[-1]] = True
        else:
            ours = streams.streams_of(self._pool.device)
            host = ours.page_locked(len(last), torch.uint8)
            host.numpy()[:] = np.frombuffer(last, dtype=np.uint8)
            self.keep(self._slots(blocks, end_token - 1, end_token), ours.upload(host).view(self._ring_CE.dtype)[None])

    def slots_before(self, rows: Sequence[HeadRow]) -> list[int]:
        """Return the slot of the position before each row's last token."""
        size, before = self._size, [row.position - 1 for row in rows]
        return [row.blocks[at // size] * size + at % size for row, at in zip(rows, before, strict=True)]

    def _slots(self, blocks: Sequence[int], first_token: int, end_token: int) -> Ints:
        positions = np.arange(max(0, first_token), end_token)
        slots: Ints = np.array(blocks, dtype=np.int64)[positions // self._size] * self._size + positions % self._size
        return slots

    def _on_device(self, numbers: Sequence[int] | Ints) -> Tensor:
        return streams.upload_indices(numbers, self._pool.device)


def slots_before(batch: Batch, *, block_size: int) -> Ints:
    """Return the slot of the position before each token, (T,); UNKNOWN if there is none."""
    before_T = batch.slots - 1
    first_in_block = np.flatnonzero(batch.positions % block_size == 0)
    if len(first_in_block):
        rows = np.searchsorted(np.cumsum(batch.query_lens), first_in_block, side="right")
        positions = batch.positions[first_in_block] - 1
        slots = (batch.block_tables[rows, positions // block_size] + 1) * block_size - 1
        before_T[first_in_block] = np.where(positions < 0, UNKNOWN, slots)
    return before_T


def list_before(batch: Batch, slots: Sequence[int], positions: Sequence[int], *, block_size: int) -> list[int]:
    """Return `slots_before` as a list, usually without numpy, whose code is out of cache.

    slots, positions: those of the batch, as lists.
    """
    firsts = [i for i, position in enumerate(positions) if position % block_size == 0]
    found = [slot - 1 for slot in slots]
    if firsts and len(positions) > len(batch.query_lens):
        found = slots_before(batch, block_size=block_size).tolist()
    else:
        for i in firsts:
            block = positions[i] // block_size - 1
            found[i] = (int(batch.block_tables[i, block]) + 1) * block_size - 1 if block >= 0 else UNKNOWN
    return found


def continuable(batch: Batch) -> Ints:
    """Return the indices into T of the positions that rows may continue from."""
    return np.union1d(batch.logits_rows, np.cumsum(batch.query_lens) - 1)
