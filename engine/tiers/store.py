"""What keeps one rank's blocks below its pool."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class BlockStore(Protocol):
    """Blocks in numbered places, [0, num_places). Which block is in which place, rank 0 decides for all ranks, and what
    it believes is a hint: the store has the last word.

    `put` is called on the thread that computes and never waits; `get` on a thread that may wait. Nobody puts a block in
    a place that somebody is getting.
    """

    num_places: int

    def put(self, place: int, prefix_hash: bytes, payload: Tensor) -> bool:
        """Keep a block, in the stead of what was there. False: it was dropped, and the place holds nothing to rely on.

        payload: (block_bytes,) uint8, on any device; it is the caller's again when this returns.
        """
        ...

    def get(self, place: int, prefix_hash: bytes) -> Tensor | None:
        """The block's payload on the CPU, to be read only, and as long as nobody puts another one in its place.

        None: it is not there, or not as it was.
        """
        ...

    def close(self) -> None: ...
