"""Validation of messages about handoffs from other ranks. Pure.

One function per message; each raises RequestError that names the field. Checked values are safe to look up, allocate
and compute with. The ledger checks whether a handoff is open and under which epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from core.types.handoff import Handoff
from core.types.validation import check, check_address, check_name
from engine.kv.layout import KVLayout
from kvtransfer.protocol.frames import CommitFrame, Opening, SegmentFrame
from kvtransfer.protocol.plan import HeadCopy, can_share

MAX_TOKENS = 1 << 31
_MAX_CHOICES = 1024
_MAX_SECONDS = 1e6
_MAX_FEATURE_BYTES = 1 << 18


def check_handoff(handoff: Handoff, layout: KVLayout) -> None:
    """Check a handoff ticket. layout: the sending rank's."""
    check_name(handoff.id, "handoff.id")
    check_name(handoff.replica, "handoff.replica")
    check(handoff.epoch >= 1, "handoff.epoch", "must be 1 or more")
    check_ranks(len(handoff.ranks), layout, "handoff.ranks")
    for address in handoff.ranks:
        check_address(address, "handoff.ranks")
    _check_span(handoff.first_token, handoff.num_tokens, handoff.max_tokens, layout, "handoff")
    check(0 <= handoff.ttl_s <= _MAX_SECONDS, "handoff.ttl_s", f"must be 0 to {_MAX_SECONDS:.0f} seconds")


def check_opening(opening: Opening, layout: KVLayout, *, num_blocks: int, num_states: int = 0) -> None:
    """Check an opening against this rank's pool of `num_blocks` blocks and `num_states` state slots."""
    check_name(opening.handoff, "handoff")
    check_name(opening.sender, "sender", may_be_empty=True)
    _check_span(opening.first_token, opening.num_tokens, opening.max_tokens, layout, "opening")
    num_needed = -(-(opening.max_tokens - opening.first_token) // layout.block_size)
    check(num_needed <= len(opening.block_ids) <= num_blocks, "block_ids", f"must be {num_needed} to {num_blocks}")
    check_blocks(opening.block_ids, num_blocks=num_blocks)
    check(len(set(opening.block_ids)) == len(opening.block_ids), "block_ids", "must be distinct")
    slots, num_needed = opening.state_slots, int(bool(layout.recurrent_layers))
    check(len(slots) == num_needed, "state_slots", f"must be {num_needed} for this model")
    end = num_blocks + num_states
    check(all(num_blocks <= slot < end for slot in slots), "state_slots", f"must be in [{num_blocks}, {end})")


def check_blocks(blocks: Iterable[int], *, num_blocks: int) -> None:
    """Check block ids against a pool of `num_blocks` blocks."""
    check(all(0 <= block < num_blocks for block in blocks), "block_ids", f"must be below {num_blocks}")


def check_ranks(num_ranks: int, layout: KVLayout, param: str) -> None:
    """Check the tensor-parallel degree of another replica."""
    num_heads = " and ".join(map(str, sorted({*layout.kv_heads})))
    check(can_share(layout, num_ranks), param, f"{num_ranks} ranks cannot share {num_heads} KV heads")


def check_segment(frame: SegmentFrame, layout: KVLayout, *, copy: HeadCopy, num_blocks: int) -> None:
    """Check that a segment fits into this rank's pool. copy: heads of the link."""
    segment, max_positions = frame.segment, num_blocks * layout.block_size
    check_name(frame.handoff, "segment.handoff")
    check(segment.num_layers >= 1, "segment.num_layers", "must be 1 or more")
    end = layout.num_layers if segment.first_layer < layout.num_layers else layout.num_transferred
    check(segment.layers.stop <= end, "segment.num_layers", f"the model has {end} layers of this kind")
    check(copy.carries(segment), "segment.first_layer", "must be of a layer that this rank sends heads of")
    check(segment.num_tokens >= 1, "segment.num_tokens", "must be 1 or more")
    check(segment.end_token <= max_positions, "segment.num_tokens", f"the pool holds {max_positions} positions")


def check_commit(frame: CommitFrame, layout: KVLayout, *, num_blocks: int) -> None:
    """Check a commit against this rank's pool."""
    max_positions = num_blocks * layout.block_size
    check_name(frame.handoff, "commit.handoff")
    check(frame.num_tokens <= max_positions, "commit.num_tokens", f"the pool holds {max_positions} positions")
    max_next = max(max_positions, _MAX_CHOICES)
    check(len(frame.next_tokens) <= max_next, "commit.next_tokens", f"must be at most {max_next}")
    check(len(frame.features) <= _MAX_FEATURE_BYTES, "commit.features", f"must have at most {_MAX_FEATURE_BYTES} bytes")


def check_seconds(seconds: Iterable[float], param: str) -> None:
    """Check durations, which are summed and used as divisors."""
    check(
        all(math.isfinite(s) and 0 <= s <= _MAX_SECONDS for s in seconds), param, f"must be 0 to {_MAX_SECONDS:.0f} s"
    )


def _check_span(first_token: int, num_tokens: int, max_tokens: int, layout: KVLayout, prefix: str) -> None:
    check(first_token % layout.block_size == 0, f"{prefix}.first_token", f"must be a multiple of {layout.block_size}")
    is_ordered = 0 <= first_token <= num_tokens <= max_tokens <= MAX_TOKENS
    check(is_ordered, f"{prefix}.num_tokens", "must be from first_token to max_tokens")
