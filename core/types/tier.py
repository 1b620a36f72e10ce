"""Storage tiers of a replica's KV blocks."""

from __future__ import annotations

from enum import IntEnum


class Tier(IntEnum):
    """Storage tier. A smaller value is faster to reach."""

    DEVICE = 0  # the pool that the model computes on
    HOST = 1  # host memory; copied back before use
    DISK = 2  # a file; read and verified before use
