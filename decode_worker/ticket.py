"""Ticket that allows other replicas to ship KV to a prompt on this replica."""

from __future__ import annotations

import secrets

from core.types.handoff import Handoff
from engine.scheduler.prompts import Prompt


def ticket_for(prompt: Prompt, *, replica: str, addresses: tuple[str, ...], layout: str, ttl_s: float) -> Handoff:
    """Create a ticket for the positions that the prompt lacks. Its id is unique and unguessable.

    A sequence that runs on another replica has KV for all tokens but the last, and keeps growing; the ticket covers as
    many positions as there are blocks.
    """
    sequence = prompt.sequence
    is_growing = prompt.is_running_elsewhere
    num_tokens = len(sequence.tokens) - is_growing
    return Handoff(
        id=f"{replica}/{prompt.id}/{secrets.token_hex(16)}",
        epoch=1,
        replica=replica,
        ranks=addresses,
        layout=layout,
        num_tokens=num_tokens,
        max_tokens=min(len(sequence.blocks) * sequence.block_size, sequence.max_context) if is_growing else num_tokens,
        first_token=prompt.num_cached,
        ttl_s=ttl_s,
    )
