"""What a decode replica opens for KV that comes from elsewhere: the table for its ranks, the ticket for the sender."""

from __future__ import annotations

import time

from cluster.words.handoff import Handoff
from engine.group import Group, Source
from kvtransfer.protocol.frames import Opening


def opening_for(group: Group, *, replica: str) -> Opening:
    """The positions that the group lacks, and the blocks that they go to. Its id is never used again.

    Of a sequence that runs elsewhere there is KV for all tokens but the last, and soon for more: as many as there are
    blocks for.
    """
    root = group.root
    is_growing = group.source is Source.DECODE
    num_tokens = len(root.tokens) - is_growing
    return Opening(
        handoff=f"{replica}/{group.id}/{time.monotonic_ns():x}",
        first_token=group.num_cached,
        num_tokens=num_tokens,
        max_tokens=min(len(root.blocks) * root.block_size, root.max_context) if is_growing else num_tokens,
        block_ids=tuple(root.blocks[group.num_cached // root.block_size :]),
    )


def ticket_for(opening: Opening, *, replica: str, addresses: tuple[str, ...], layout: str, ttl_s: float) -> Handoff:
    return Handoff(
        id=opening.handoff,
        epoch=1,
        replica=replica,
        ranks=addresses,
        layout=layout,
        num_tokens=opening.num_tokens,
        max_tokens=opening.max_tokens,
        first_token=opening.first_token,
        ttl_s=ttl_s,
    )
