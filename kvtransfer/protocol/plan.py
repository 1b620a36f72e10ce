"""Assignment of KV heads to pairs of sending and receiving ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from core.types.validation import MAX_RANKS
from engine.kv.layout import KVLayout, head_range
from kvtransfer.protocol.frames import Segment

# Pair of ranks: sender, receiver.
_Pair = tuple[int, int]
_NONE = range(0), range(0)


@dataclass(frozen=True, kw_only=True)
class HeadCopy:
    """Heads that one sending rank copies to one receiving rank.

    `sender_heads` and `receiver_heads` have the heads of each layer, as indices within each rank's own heads. They are
    empty for a layer that this pair does not copy. Parts of states follow the layers with KV, with units in place of
    heads; see KVLayout.num_units.
    """

    sender: int
    receiver: int
    sender_heads: tuple[range, ...]
    receiver_heads: tuple[range, ...]

    @property
    def layers(self) -> list[int]:
        """Layers with heads that this pair copies."""
        return [layer for layer, heads in enumerate(self.sender_heads) if heads]

    def carries(self, segment: Segment) -> bool:
        """Return whether this pair copies heads of any layer of the segment. Those layers must exist."""
        return any(self.sender_heads[layer] for layer in segment.layers)


def plan_heads(*, sender: KVLayout, receiver: KVLayout) -> list[HeadCopy]:
    """Return copies that cover every head of every layer of every receiving rank exactly once.

    Two ranks share at most one copy. If several sending ranks hold the same head (more ranks than heads), the receiving
    ranks spread over them. Rank 0 always sends to rank 0, because the commit between the two carries the first tokens.

        6 heads, sender tp 2     |0 1 2|3 4 5|
        receiver tp 3            |0 1|2 3|4 5|     (0→0: 0 1) (0→1: 2) (1→1: 3) (1→2: 4 5)
    """
    # By the number of KV heads of a layer.
    runs = {
        count: dict(_runs(count, num_senders=sender.tensor_parallel, num_receivers=receiver.tensor_parallel))
        for count in dict.fromkeys(receiver.num_units)
    }
    copies = []
    for pair in dict.fromkeys(pair for of_count in runs.values() for pair in of_count):
        heads = [runs[count].get(pair, _NONE) for count in receiver.num_units]
        sender_heads, receiver_heads = zip(*heads, strict=True)
        copies.append(
            HeadCopy(sender=pair[0], receiver=pair[1], sender_heads=sender_heads, receiver_heads=receiver_heads)
        )
    return copies


def head_counts(layout: KVLayout) -> list[tuple[int, ...]]:
    """Return the number of heads of each layer, for every copy to or from a rank of `layout`, in ascending order.

    Considers peers of every tensor-parallel degree that divides the KV heads of all layers or is a multiple of them, up
    to their least common multiple. A higher degree copies single heads, which are included.
    """
    most = min(MAX_RANKS, math.lcm(*layout.kv_heads))
    peers = (degree for degree in range(1, most + 1) if can_share(layout, degree))
    counts = set()
    for degree in peers:
        peer = replace(layout, tensor_parallel=degree)
        for sender, receiver in ((layout, peer), (peer, layout)):
            counts |= {tuple(map(len, copy.sender_heads)) for copy in plan_heads(sender=sender, receiver=receiver)}
    return sorted(counts)


def can_share(layout: KVLayout, num_ranks: int) -> bool:
    """Return whether `num_ranks` ranks can split each layer's KV heads, or replicate each of its heads evenly.

    RecurrentShape.can_share must be true of each recurrent layer.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        return False
    if not all(shape.can_share(num_ranks) for shape in layout.recurrent_layers):
        return False
    return all(count % num_ranks == 0 or num_ranks % count == 0 for count in {*layout.kv_heads})


def sending_ranks(layout: KVLayout, *, num_receivers: int) -> set[int]:
    """Return the ranks of a replica of `layout` that send to a replica of `num_receivers` ranks."""
    copies = plan_heads(sender=layout, receiver=replace(layout, tensor_parallel=num_receivers))
    return {copy.sender for copy in copies}


def _runs(count: int, *, num_senders: int, num_receivers: int) -> Iterator[tuple[_Pair, tuple[range, range]]]:
    """Yield, for a layer of `count` KV heads, each pair of ranks and the heads that it copies, as in HeadCopy."""
    for rank in range(num_receivers):
        start, end = head_range(count, rank=rank, num_ranks=num_receivers)
        head = start
        while head < end:
            source = _source_of(head, count, num_senders=num_senders, spread=rank)
            first, last = head_range(count, rank=source, num_ranks=num_senders)
            stop = min(last, end)
            yield (source, rank), (range(head - first, stop - first), range(head - start, stop - start))
            head = stop


def _source_of(head: int, count: int, *, num_senders: int, spread: int) -> int:
    """Return a rank that holds `head` of `count`; `spread` (modulo their number) selects one of several."""
    if num_senders <= count:
        return head * num_senders // count
    replicas = num_senders // count
    return head * replicas + spread % replicas
