"""Blocks in the machine's own memory."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kv.pool import lazy_zeros
from engine.runner import streams
from engine.runner.streams import Event


class HostStore:
    """Implements BlockStore. Its memory is one piece, which is mapped as it is first used; for a CUDA pool all of it is
    page-locked at once. Raises SpecError where the machine does not do that."""

    def __init__(self, *, num_places: int, block_bytes: int, device: torch.device) -> None:
        """device: of the pool that the blocks come from, and go back to."""
        self.num_places = num_places
        self._rows = lazy_zeros((num_places, block_bytes), torch.uint8)
        self._streams = streams.streams_of(device)
        self._streams.lock_pages(self._rows)
        self._hashes: list[bytes | None] = [None] * num_places
        self._saved: dict[int, Event] = {}  # by place

    def put(self, place: int, prefix_hash: bytes, payload: Tensor) -> bool:
        self._rows[place].copy_(payload)
        self._hashes[place] = prefix_hash
        return True

    def get(self, place: int, prefix_hash: bytes) -> Tensor | None:
        """Waits for a device that is still saving it."""
        if self._hashes[place] != prefix_hash:
            return None
        if saved := self._saved.get(place):
            saved.wait()
        return self._rows[place]

    def row(self, place: int) -> Tensor:
        """To be filled, in the stead of what was there, and then to be told of by `is_saved`."""
        self._hashes[place] = None
        return self._rows[place]

    def is_saved(self, place: int, prefix_hash: bytes, when: Event) -> None:
        """Its row has this content when the event has come."""
        self._saved[place], self._hashes[place] = when, prefix_hash

    def close(self) -> None:
        for saved in self._saved.values():
            saved.wait()
        self._streams.unlock_pages(self._rows)
