"""Copies of whole blocks between a rank's pool and host memory, overlapped with compute.

    save   pool ──gather, on the compute stream──> staging ──down stream──> host row
    load   host row ──up stream──> staging ──up stream──> pool

A gather takes microseconds and the bus transfer takes as long as a step. A block may be overwritten right after its
gather, and no step waits for the bus unless saves exceed its bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import torch
from torch import Tensor

from engine.kv.pool import KVPool
from engine.runner import streams
from engine.runner.streams import Event

# Blocks per copy.
BATCH = 16


class BlockCopies:
    """Block copies of one rank. The compute thread calls `save`, the loader thread calls `load`."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._streams = streams.streams_of(pool.device)
        self._down, self._up = self._streams.device_stream(), self._streams.device_stream()
        self._going_down = cycle([_Staging(pool), _Staging(pool)])
        self._going_up = _Staging(pool)

    def save(self, blocks: Sequence[int], rows: Sequence[Tensor]) -> Event:
        """Copy up to BATCH blocks to host rows, each (place_bytes,) uint8.

        Work that the caller starts afterwards may overwrite the blocks. The rows are valid once the event completes.
        """
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
        """Copy up to BATCH rows to blocks after the event `behind`; returns when the copy is complete."""
        staged_BN = self._going_up.rows_BN[: len(rows)]
        with self._up.entered():
            for row, staged in zip(rows, staged_BN, strict=True):
                self._streams.copy(staged, row)
            behind.hold_up()
            self._pool.copy_in(staged_BN, blocks)
            loaded = self._streams.mark()
        loaded.wait()


class _Staging:
    """Device buffer of one batch."""

    def __init__(self, pool: KVPool) -> None:
        self.rows_BN = torch.empty((BATCH, pool.layout.place_bytes), dtype=torch.uint8, device=pool.device)
        # Completes when the buffer may be filled again.
        self.emptied = streams.streams_of(pool.device).mark()
