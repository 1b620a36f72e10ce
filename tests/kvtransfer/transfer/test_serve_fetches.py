"""Duplicate fetch calls and late reports, a case that the model test finds once in five thousand runs."""

from __future__ import annotations

from core.types.errors import LinkClosed, TransferError
from engine.kv.block_manager import BlockManager
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.serve_fetches import ServedFetches
from tests.kvtransfer.protocol.sending_world import BLOCK_SIZE, NUM_BLOCKS, hashes_of, layout
from tests.kvtransfer.replicas import handoff_to


class Listener:
    def __init__(self) -> None:
        self.errors: list[TransferError | None] = []

    def served(self, num_tokens: int) -> None:
        pass

    def ended(self, shipment: Shipment | None, error: TransferError | None) -> None:
        self.errors.append(error)


def test_a_prefix_is_not_shipped_twice_under_one_handoff() -> None:
    """A late report of the first transfer would end the second one, and free blocks that are still being read."""
    blocks = BlockManager(NUM_BLOCKS)
    no_tiers: Tiers[object] = Tiers(blocks, None, layout(1), eviction="lru", timeout_s=1.0)
    served_fetches = ServedFetches(blocks, layout(1), no_tiers)
    held, _ = blocks.allocate([], 2) or ([], 0)
    for block, prefix_hash in zip(held, hashes_of(0), strict=False):
        blocks.fill_block(block, prefix_hash)
    blocks.free(held)
    handoff = handoff_to(["r"], 2 * BLOCK_SIZE)
    failed = Shipment(handoff="h", epoch=1, wire_bytes=0, seconds=0.0, link_s=0.0, error=LinkClosed("gone"))

    first, again = Listener(), Listener()
    served_fetches.serve(handoff, hashes_of(0), first)
    served_fetches.shipped(0, failed)
    served_fetches.serve(handoff, hashes_of(0), again)
    served_fetches.shipped(0, failed)
    assert [str(error) for error in first.errors] == ["gone"]
    assert [str(error) for error in again.errors] == ["handoff h is a duplicate"]
    assert len(served_fetches.take_orders()) == 1 and not len(served_fetches)
    assert blocks.num_available == NUM_BLOCKS
