"""Head plans cover every head of every layer of every receiving rank once, from a rank that holds it."""

from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.kv.layout import KVLayout
from kvtransfer.protocol.plan import can_share, head_counts, plan_heads, sending_ranks

_HEADS = (1, 2, 3, 4, 6, 8, 12)
_TPS = range(1, 25)


def _layout(tp: int, *num_kv_heads: int) -> KVLayout:
    return KVLayout(
        model="m",
        num_layers=len(num_kv_heads),
        num_kv_heads=num_kv_heads,
        head_dim=8,
        block_size=16,
        dtype="float32",
        tensor_parallel=tp,
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    """Return layouts of a sender and a receiver, of up to five layers with any numbers of heads."""
    tps = draw(st.sampled_from(_TPS)), draw(st.sampled_from(_TPS))
    fitting = [heads for heads in _HEADS if all(can_share(_layout(1, heads), tp) for tp in tps)]
    counts = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=5))
    return _layout(tps[0], *counts), _layout(tps[1], *counts)


@given(pairs())
def test_every_receiver_head_is_copied_once_from_a_rank_that_holds_it(pair: tuple[KVLayout, KVLayout]) -> None:
    sender, receiver = pair
    arrived: dict[tuple[int, int], list[int]] = {
        place: [] for place in product(range(receiver.tensor_parallel), range(receiver.num_layers))
    }
    copies = plan_heads(sender=sender, receiver=receiver)
    for copy in copies:
        for layer, (sent, received) in enumerate(zip(copy.sender_heads, copy.receiver_heads, strict=True)):
            held = range(*sender.head_range(layer, rank=copy.sender))
            own = range(*receiver.head_range(layer, rank=copy.receiver))
            assert held[sent.start : sent.stop] == own[received.start : received.stop]
            assert len(sent) == len(received) == len(held[sent.start : sent.stop])
            arrived[copy.receiver, layer] += own[received.start : received.stop]
    for (rank, layer), heads in arrived.items():
        assert sorted(heads) == list(range(*receiver.head_range(layer, rank=rank)))
    ranks = [(copy.sender, copy.receiver) for copy in copies]
    assert len({*ranks}) == len(ranks) and (0, 0) in ranks, "rank 0 always sends to rank 0"
    assert sending_ranks(sender, num_receivers=receiver.tensor_parallel) == {copy.sender for copy in copies}


@given(pairs())
@example((_layout(1, 2, 3), _layout(6, 2, 3)))  # more ranks than heads, and two heads in some copies
def test_head_counts_cover_every_plan(pair: tuple[KVLayout, KVLayout]) -> None:
    counts = [head_counts(layout) for layout in pair]
    for copy in plan_heads(sender=pair[0], receiver=pair[1]):
        for layer, heads in enumerate(copy.sender_heads):
            if heads:
                assert all(len(heads) in {of_copy[layer] for of_copy in found} for found in counts)


def test_replicated_heads_are_spread_over_their_holders() -> None:
    copies = plan_heads(sender=_layout(4, 2), receiver=_layout(4, 2))
    assert [(c.sender, c.receiver) for c in copies] == [(0, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize(
    ("num_kv_heads", "num_ranks", "can"),
    [
        ((8,), 4, True),
        ((8,), 16, True),
        ((8,), 3, False),
        ((8, 2), 4, True),  # split, and replicated
        ((6, 4), 2, True),
        ((6, 4), 3, False),  # 4 heads do not split
        ((6, 4), 12, True),
        ((8,), 0, False),
        ((8,), 1 << 30, False),
    ],
)
def test_ranks_that_can_share_heads(num_kv_heads: tuple[int, ...], num_ranks: int, can: bool) -> None:
    assert can_share(_layout(1, *num_kv_heads), num_ranks) == can
