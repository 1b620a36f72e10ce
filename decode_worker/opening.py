"""What a decode replica opens for KV that comes from elsewhere: the table for its ranks, the ticket for the sender."""

from __future__ import annotations

import time

from cluster.words.handoff import Handoff
from engine.prompts import Prompt
from kvtransfer.protocol.frames import Opening


def opening_for(prompt: Prompt, *, replica: str) -> Opening:
    """The positions that the prompt lacks, and the blocks that they go to. Its id is never used again.

    Of a sequence that runs elsewhere there is KV for all tokens but the last, and soon for more: as many as there are
    blocks for.
    """
    sequence = prompt.sequence
    is_growing = prompt.is_running_elsewhere
    num_tokens = len(sequence.tokens) - is_growing
    return Opening(
        handoff=f"{replica}/{prompt.id}/{time.monotonic_ns():x}",
        first_token=prompt.num_cached,
        num_tokens=num_tokens,
        max_tokens=min(len(sequence.blocks) * sequence.block_size, sequence.max_context) if is_growing else num_tokens,
        block_ids=tuple(sequence.blocks[prompt.num_cached // sequence.block_size :]),
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
