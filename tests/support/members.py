"""Member records for tests that need only a few of their fields."""

from __future__ import annotations

from core.index.membership import Member
from core.types.request import Role


def make_member(
    replica: str = "decode-0", *, address: str = "127.0.0.1:1", frames_address: str = "127.0.0.1:1"
) -> Member:
    """Make a record. replica: its name, from which the role follows."""
    return Member(
        replica=replica,
        role=Role(replica.partition("-")[0]),
        address=address,
        frames_address=frames_address,
        layout="abc",
        num_blocks=10,
        block_size=16,
        bytes_per_token=64,
        max_tokens=100,
    )
