"""Interface of a tier's block store, and the host tier: blocks in main memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.kv.pool import lazy_zeros
from engine.runner import streams
from engine.runner.streams import Event


class BlockStore(Protocol):
    """Blocks in numbered places, [0, num_places). Rank 0 assigns blocks to places for all ranks.

    Its assignment is a hint: the store decides what is valid. The compute thread calls `put`, which never waits; the
    loader thread calls `get`, which may. No caller puts a block into a place that is being read.
    """

    num_places: int

    def put(self, place: int, prefix_hash: bytes, payload: Tensor) -> bool:
        """Store a block and replace the previous one. Returns False if it was dropped; the place is then invalid.

        payload: (place_bytes,) uint8, on any device; the caller may reuse it on return.
        """
        ...

    def get(self, place: int, prefix_hash: bytes) -> Tensor | None:
        """Return the block's payload on the CPU, read-only, valid until the next `put` to this place.

        Returns None if the block is missing or damaged.
        """
        ...

    def close(self) -> None: ...


class HostStore:
    """Implements BlockStore in one allocation that is mapped on first use; for a CUDA pool it is page-locked at once.

    Raises SpecError if the machine cannot page-lock it.
    """

    def __init__(self, *, num_places: int, place_bytes: int, device: torch.device) -> None:
        """device: device of the pool that the blocks are copied from and to."""
        self.num_places = num_places
        self._rows = lazy_zeros((num_places, place_bytes), torch.uint8)
        self._streams = streams.streams_of(device)
        self._streams.lock_pages(self._rows)
        self._hashes: list[bytes | None] = [None] * num_places
        self._saved: dict[int, Event] = {}  # by place

    def put(self, place: int, prefix_hash: bytes, payload: Tensor) -> bool:
        self._rows[place].copy_(payload)
        self._hashes[place] = prefix_hash
        return True

    def get(self, place: int, prefix_hash: bytes) -> Tensor | None:
        """Return the payload; waits for a save in progress."""
        if self._hashes[place] != prefix_hash:
            return None
        if saved := self._saved.get(place):
            saved.wait()
        return self._rows[place]

    def row(self, place: int) -> Tensor:
        """Return the row to overwrite. Its content is invalid until `is_saved`."""
        self._hashes[place] = None
        return self._rows[place]

    def is_saved(self, place: int, prefix_hash: bytes, when: Event) -> None:
        """Mark the row as holding this block once the event `when` completes."""
        self._saved[place], self._hashes[place] = when, prefix_hash

    def close(self) -> None:
        for saved in self._saved.values():
            saved.wait()
        self._streams.unlock_pages(self._rows)
