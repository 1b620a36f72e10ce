"""Assignment of KV heads to pairs of sending and receiving ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.kv.layout import KVLayout


@dataclass(frozen=True, kw_only=True)
class HeadCopy:
    """A run of `num_heads` heads that one sending rank copies to one receiving rank.

    `sender_head` and `receiver_head` are the index of the first head within each rank's own heads.
    """

    sender: int
    receiver: int
    sender_head: int
    receiver_head: int
    num_heads: int


def plan_heads(*, sender: KVLayout, receiver: KVLayout) -> list[HeadCopy]:
    """Return copies that cover every head of every receiving rank exactly once.

    If several sending ranks hold the same head (more ranks than heads), the receiving ranks spread over them.
    Rank 0 always sends to rank 0, because the commit between the two carries the first tokens.

        6 heads, sender tp 2     |0 1 2|3 4 5|
        receiver tp 3            |0 1|2 3|4 5|     (0→0: 0 1) (0→1: 2) (1→1: 3) (1→2: 4 5)
    """
    copies = []
    for rank in range(receiver.tensor_parallel):
        start, end = receiver.head_range(rank)
        head = start
        while head < end:
            source = _source_of(sender, head, spread=rank)
            first, last = sender.head_range(source)
            num_heads = min(last, end) - head
            copies.append(
                HeadCopy(
                    sender=source,
                    receiver=rank,
                    sender_head=head - first,
                    receiver_head=head - start,
                    num_heads=num_heads,
                )
            )
            head += num_heads
    return copies


def head_counts(layout: KVLayout) -> list[int]:
    """Return every `num_heads` that a copy to or from a rank of `layout` can have, in ascending order.

    Considers peers of every tensor-parallel degree that divides the model's KV heads. A higher degree copies single
    heads, which are included.
    """
    peers = (degree for degree in range(1, layout.num_kv_heads + 1) if layout.num_kv_heads % degree == 0)
    counts = set()
    for degree in peers:
        peer = replace(layout, tensor_parallel=degree)
        for sender, receiver in ((layout, peer), (peer, layout)):
            counts |= {copy.num_heads for copy in plan_heads(sender=sender, receiver=receiver)}
    return sorted(counts)


def sending_ranks(layout: KVLayout, *, num_receivers: int) -> set[int]:
    """Return the ranks of a replica of `layout` that send to a replica of `num_receivers` ranks."""
    copies = plan_heads(sender=layout, receiver=replace(layout, tensor_parallel=num_receivers))
    return {copy.sender for copy in copies}


def _source_of(layout: KVLayout, head: int, *, spread: int) -> int:
    """Return a rank that holds `head`; `spread` (modulo their number) selects one of several."""
    if layout.tensor_parallel <= layout.num_kv_heads:
        return head * layout.tensor_parallel // layout.num_kv_heads
    replicas = layout.tensor_parallel // layout.num_kv_heads
    return head * replicas + spread % replicas
