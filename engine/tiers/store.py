"""Interface of a tier that stores one rank's blocks below its pool."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


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
