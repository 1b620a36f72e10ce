"""Where a replica holds a block."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """The smaller, the sooner a block is at hand."""

    DEVICE = 0  # in the pool that the model computes on
    HOST = 1  # in the machine's memory, to be copied back
    DISK = 2  # in a file, to be read and checked
