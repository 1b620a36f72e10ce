"""Head plans cover every head of every receiving rank once, from a rank that holds it."""

from hypothesis import given
from hypothesis import strategies as st

from engine.kv.layout import KVLayout
from kvtransfer.protocol.plan import head_counts, plan_heads

_FITS = [(heads, tp) for heads in (1, 2, 3, 4, 6, 8, 12) for tp in range(1, 25) if heads % tp == 0 or tp % heads == 0]


def _layout(heads: int, tp: int) -> KVLayout:
    return KVLayout(
        model="m", num_layers=1, num_kv_heads=heads, head_dim=8, block_size=16, dtype="float32", tensor_parallel=tp
    )


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    heads, sender_tp = draw(st.sampled_from(_FITS))
    receiver_tp = draw(st.sampled_from([tp for h, tp in _FITS if h == heads]))
    return _layout(heads, sender_tp), _layout(heads, receiver_tp)


@given(_pairs())
def test_every_receiver_head_is_copied_once_from_a_rank_that_holds_it(pair: tuple[KVLayout, KVLayout]) -> None:
    sender, receiver = pair
    arrived: dict[int, list[int]] = {rank: [] for rank in range(receiver.tensor_parallel)}
    for copy in plan_heads(sender=sender, receiver=receiver):
        assert 0 <= copy.sender_head and copy.sender_head + copy.num_heads <= sender.heads_per_rank
        first_sent = sender.head_range(copy.sender)[0] + copy.sender_head
        first_received = receiver.head_range(copy.receiver)[0] + copy.receiver_head
        assert first_sent == first_received
        arrived[copy.receiver] += range(first_received, first_received + copy.num_heads)
    for rank, heads in arrived.items():
        assert sorted(heads) == list(range(*receiver.head_range(rank)))


@given(_pairs())
def test_head_counts_cover_every_plan(pair: tuple[KVLayout, KVLayout]) -> None:
    for copy in plan_heads(sender=pair[0], receiver=pair[1]):
        assert all(copy.num_heads in head_counts(layout) for layout in pair)


@given(_pairs())
def test_rank_0_always_sends_to_rank_0(pair: tuple[KVLayout, KVLayout]) -> None:
    sender, receiver = pair
    assert any(copy.sender == copy.receiver == 0 for copy in plan_heads(sender=sender, receiver=receiver))


def test_replicated_heads_are_spread_over_their_holders() -> None:
    copies = plan_heads(sender=_layout(2, 4), receiver=_layout(2, 4))
    assert [(c.sender, c.receiver) for c in copies] == [(0, 0), (1, 1), (2, 2), (3, 3)]
