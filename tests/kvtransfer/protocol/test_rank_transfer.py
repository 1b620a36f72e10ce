"""RankTransfer sends every position of every layer once, in payloads whose size is independent of the prompt length."""

from __future__ import annotations

import pytest

from core.types.errors import TransferError
from core.types.handoff import Handoff
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.ledger import Ledger
from kvtransfer.protocol.plan import HeadCopy
from kvtransfer.protocol.rank_transfer import Ending, LinkTransfer, RankTransfer
from kvtransfer.protocol.segment import Segment
from tests.kvtransfer.protocol.pools import NUM_LAYERS, layout

_GROUP_ROWS = 10
_COPY = HeadCopy(sender=0, receiver=0, sender_head=0, receiver_head=0, num_heads=2)


class FakeCarrier:
    """Carrier that announces every item at once to a ledger."""

    def __init__(self, handoff: Handoff) -> None:
        self.sizes: list[int] = []  # rows of each payload
        opening = Opening.of(handoff, range(handoff.max_tokens - handoff.first_token))
        self._ledger = Ledger(opening, num_layers=NUM_LAYERS)
        self.has_landed = False

    def put(self, link_transfer: LinkTransfer, item: Segment | Ending) -> None:
        if isinstance(item, Ending):
            self.has_landed = (
                self._ledger.commit(link_transfer.announce_commit(item), source=0, num_sources=1) is not None
            )
        else:
            self.sizes.append(item.num_layers * item.num_tokens)
            assert self._ledger.accept(link_transfer.announce(item, num_bytes=1, checksum=len(self.sizes)), source=0)

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
    handoff = Handoff(
        id="h",
        epoch=1,
        replica="decode-0",
        ranks=("there",),
        layout="",
        num_tokens=end,
        max_tokens=end,
        first_token=first,
        ttl_s=1.0,
    )
    transfer, carrier = RankTransfer(handoff, range(15), layout=layout(1), group_rows=_GROUP_ROWS), FakeCarrier(handoff)
    transfer.link_transfers = [LinkTransfer(transfer, _COPY, carrier)]
    transfer.all_layers_ready(0, end)
    transfer.commit(end)
    assert carrier.sizes == sizes and max(sizes) < 2 * _GROUP_ROWS
    assert carrier.has_landed
