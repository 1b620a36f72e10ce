"""A handoff fails alone if the ranks of a replica report different results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.kv.block_manager import BlockManager
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.incoming_transfers import IncomingTransfer, IncomingTransfers
from kvtransfer.protocol.ledger import Landing


def _incoming_transfers(num_ranks: int = 2) -> tuple[IncomingTransfers[str], IncomingTransfer[str], BlockManager]:
    blocks = BlockManager(8)
    taken, _ = blocks.allocate([], 3) or ([], 0)
    receiver: Any = SimpleNamespace(open=lambda opening: None, close=lambda handoff: None)
    incoming_transfers: IncomingTransfers[str] = IncomingTransfers(
        receiver, blocks, num_ranks=num_ranks, close_elsewhere=lambda handoff, then: then()
    )
    opening = Opening(handoff="h", num_tokens=20, max_tokens=24, block_ids=tuple(taken))
    return incoming_transfers, incoming_transfers.open(opening, owner="request", expires_at=1000.0), blocks


def _landing(num_tokens: int, *, epoch: int = 1) -> Landing:
    return Landing(handoff="h", epoch=epoch, num_tokens=num_tokens)


@pytest.mark.parametrize("counts", [(20, 21), (19, 19), (25, 25), (0, 0)])
def test_handoff_fails_at_once_if_ranks_report_unexpected_positions(counts: tuple[int, int]) -> None:
    incoming_transfers, incoming, blocks = _incoming_transfers()
    assert [incoming_transfers.landed(rank, _landing(count)) for rank, count in enumerate(counts)] == [None, None]
    assert incoming_transfers.expired(0.0) == [incoming] and str(counts[0]) in incoming.problem
    incoming_transfers.give_up(incoming)
    assert not len(incoming_transfers)
    assert blocks.num_available == 8
    blocks.check_integrity()


@pytest.mark.parametrize("pending_peer", [2, -1, 1 << 31])
def test_landing_of_an_unknown_rank_is_ignored(pending_peer: int) -> None:
    incoming_transfers, incoming, _ = _incoming_transfers()
    assert incoming_transfers.landed(1, _landing(22)) is None
    assert incoming_transfers.landed(pending_peer, _landing(22)) is None
    assert len(incoming_transfers) == 1 and incoming_transfers.expired(0.0) == []
    assert incoming_transfers.landed(0, _landing(22)) is incoming and incoming.landing.num_tokens == 22
