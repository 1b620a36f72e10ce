"""Head plans cover every head of every layer of every rank once, and rank transfers send every position of it."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.types.errors import TransferError
from core.types.handoff import Handoff
from engine.kv.layout import KVLayout
from kvtransfer.protocol.frames import CommitFrame, Opening, Segment
from kvtransfer.protocol.ledger import Ledger
from kvtransfer.protocol.plan import can_share, head_counts, plan_heads, sending_ranks
from kvtransfer.protocol.rank_transfer import LinkTransfer, RankTransfer
from tests.kvtransfer.protocol.sender_model import layout
from tests.kvtransfer.replicas import handoff_to

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


_GROUP_ROWS = 10
(_COPY,) = plan_heads(sender=layout(1), receiver=layout(1))


class FakeCarrier:
    """Carrier that announces every item at once to a ledger."""

    def __init__(self, handoff: Handoff, *, num_sources: int = 1) -> None:
        """num_sources: number of ranks that send to the carrier's receiving rank."""
        self.sizes: list[int] = []  # rows of each payload
        self.copied: Counter[tuple[int, int, int]] = Counter()  # layer, head of the receiver, position
        opening = Opening.of(handoff, range(handoff.max_tokens - handoff.first_token))
        self._ledger = Ledger(opening)
        self._num_sources = num_sources
        self.has_landed = False

    def put(self, link_transfer: LinkTransfer, item: Segment | CommitFrame) -> None:
        copy = link_transfer.copy
        if isinstance(item, CommitFrame):
            commit = link_transfer.announce_commit(item)
            self.has_landed = self._ledger.commit(commit, copy=copy, num_sources=self._num_sources) is not None
            return
        self.sizes.append(item.num_layers * item.num_tokens)
        assert self._ledger.accept(link_transfer.announce(item, num_bytes=1, checksum=len(self.sizes)), copy=copy)
        for layer in item.layers:
            self.copied.update(product([layer], copy.receiver_heads[layer], range(item.first_token, item.end_token)))

    def abort(self, link_transfer: LinkTransfer, error: TransferError) -> None:
        link_transfer.fail(error)


@pytest.mark.parametrize(
    ("first", "end", "sizes"),
    [
        (0, 3, [6]),  # short prompt: all layers together
        (0, 9, [18]),
        (0, 10, [10, 10]),  # layer by layer
        (4, 30, [10, 10, 10, 10, 12]),  # long prompt: ranges of positions
    ],
)
def test_payload_size_of_cached_kv_is_independent_of_prompt_length(first: int, end: int, sizes: list[int]) -> None:
    handoff = handoff_to(["there"], end, first_token=first)
    transfer, carrier = RankTransfer(handoff, range(15), layout=layout(1), group_rows=_GROUP_ROWS), FakeCarrier(handoff)
    transfer.link_transfers = [LinkTransfer(transfer, _COPY, carrier)]
    transfer.all_layers_ready(0, end)
    transfer.commit(end)
    assert carrier.sizes == sizes and max(sizes) < 2 * _GROUP_ROWS
    assert carrier.has_landed


@given(
    pairs(), st.integers(0, 3), st.lists(st.integers(1, 8), min_size=1, max_size=4), st.sampled_from([1, 5, 16, 1000])
)
def test_every_position_of_every_head_is_sent_once(
    pair: tuple[KVLayout, KVLayout], first: int, chunks: list[int], group_rows: int
) -> None:
    """For unlike layers, unlike tensor parallelism, and any chunks and sizes of payloads."""
    sender, receiver = pair
    copies = plan_heads(sender=sender, receiver=receiver)
    bounds = [0, *accumulate(chunks)]
    first = min(first, bounds[-1])
    handoff = handoff_to(["there"], bounds[-1], first_token=first)
    sources = Counter(copy.receiver for copy in copies)
    carriers = {rank: FakeCarrier(handoff, num_sources=count) for rank, count in sources.items()}
    for rank in {copy.sender for copy in copies}:
        transfer = RankTransfer(handoff, range(64), layout=sender, group_rows=group_rows)
        mine = [copy for copy in copies if copy.sender == rank]
        transfer.link_transfers = [LinkTransfer(transfer, copy, carriers[copy.receiver]) for copy in mine]
        for start, end in pairwise(bounds):
            for layer in range(sender.num_layers):
                transfer.layer_ready(layer, start, end)
        transfer.commit(bounds[-1])
    for carrier in carriers.values():
        places = (
            place
            for layer, heads in enumerate(receiver.heads)
            for place in product([layer], range(heads.num_heads), range(first, bounds[-1]))
        )
        assert carrier.has_landed and carrier.copied == Counter(places)
