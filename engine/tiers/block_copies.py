"""Whole blocks between a rank's pool and the memory of its machine, beside what is computed.

    save   pool ──gathered, where steps are computed──> staging ──on the lane down──> a row of the host's
    load   a row of the host's ──on the lane up──> staging ──on the lane up──> pool

Gathering takes a device microseconds, the way over the bus as long as a step: so a block may be written again as soon
as it was gathered, and no step waits for the bus, unless more is saved than the bus carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import torch
from torch import Tensor

from engine.kv.pool import KVPool
from engine.runner import streams
from engine.runner.streams import Event

BATCH = 16  # blocks at a time


class BlockCopies:
    """`save` belongs to the thread that computes, `load` to the one that loads."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._streams = streams.streams_of(pool.device)
        self._down, self._up = self._streams.device_stream(), self._streams.device_stream()
        self._going_down = cycle([_Staging(pool), _Staging(pool)])
        self._going_up = _Staging(pool)

    def save(self, blocks: Sequence[int], rows: Sequence[Tensor]) -> Event:
        """Copy up to BATCH blocks to rows of the host, (block_bytes,) uint8 each. What the caller starts from now on
        may write to the blocks; the rows have their content when the event has come."""
        staging = next(self._going_down)
        staging.emptied.hold_up()
        staged_BN = staging.rows_BN[: len(blocks)]
        self._pool.copy_out(blocks, into=staged_BN)
        gathered = self._streams.mark()
        with self._down.entered():
            gathered.hold_up()
            for row, staged in zip(rows, staged_BN, strict=True):
                self._streams.copy(row, staged)
            staging.emptied = self._streams.mark()
        return staging.emptied

    def load(self, rows: Sequence[Tensor], blocks: Sequence[int], *, behind: Event) -> None:
        """Copy up to BATCH rows to blocks, behind what these were used for before; returns when they are there."""
        staged_BN = self._going_up.rows_BN[: len(rows)]
        with self._up.entered():
            for row, staged in zip(rows, staged_BN, strict=True):
                self._streams.copy(staged, row)
            behind.hold_up()
            self._pool.copy_in(staged_BN, blocks)
            loaded = self._streams.mark()
        loaded.wait()


class _Staging:
    def __init__(self, pool: KVPool) -> None:
        self.rows_BN = torch.empty((BATCH, pool.layout.block_bytes), dtype=torch.uint8, device=pool.device)
        self.emptied = streams.streams_of(pool.device).mark()  # when it may be filled again
