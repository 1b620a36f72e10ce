"""Blocks in the machine's own memory."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kv.pool import lazy_zeros


class HostStore:
    """Implements BlockStore. Its memory is mapped as it is first used; for a CUDA pool it is page-locked at once."""

    def __init__(self, *, num_places: int, block_bytes: int, device: torch.device) -> None:
        """device: of the pool that the blocks come from, and go back to."""
        self.num_places = num_places
        if device.type == "cuda":
            self._rows = torch.empty((num_places, block_bytes), dtype=torch.uint8, pin_memory=True)
        else:
            self._rows = lazy_zeros((num_places, block_bytes), torch.uint8)
        self._hashes: list[bytes | None] = [None] * num_places

    def put(self, place: int, prefix_hash: bytes, payload: Tensor) -> bool:
        self._rows[place].copy_(payload)
        self._hashes[place] = prefix_hash
        return True

    def get(self, place: int, prefix_hash: bytes) -> Tensor | None:
        return self._rows[place] if self._hashes[place] == prefix_hash else None

    def close(self) -> None:
        pass
