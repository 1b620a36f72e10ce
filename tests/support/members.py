"""What a replica says of itself in Redis, for tests to which most of it does not matter."""

from __future__ import annotations

from core.index.membership import Member
from core.types.request import Role


def make_member(
    replica: str = "decode-0", *, address: str = "127.0.0.1:1", frames_address: str = "127.0.0.1:1"
) -> Member:
    """replica: its name, which says its role."""
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
