"""Served fetches: prefixes that a replica ships to other replicas on request, tracked on rank 0.

The leading blocks that are cached here are referenced until they have landed or the request is cancelled. Blocks in a
lower tier are loaded first. Serving a fetch computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from core.types.errors import HandoffExpired, TransferError
from core.types.failpoint import Failpoint, FailpointStage, unobserved
from core.types.handoff import Handoff, HandoffKey
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from engine.kv.window_manager import HeldParts
from engine.scheduler.step_commands import BeginOrder
from engine.tiers.commands import Load
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.outgoing_transfers import OutgoingTransfer, OutgoingTransfers, parts_of_handoff
from kvtransfer.protocol.plan import sending_ranks
from kvtransfer.protocol.rank_transfer import Shipment


class ServedFetchListener(Protocol):
    """Observer of one served fetch. Called on the step thread."""

    def granted(self, num_tokens: int) -> None:
        """Report the number of leading positions that the receiver will have, including those before the handoff.

        If that adds nothing to the receiver's prefix, the fetch is over and `ended` is not called.
        """
        ...

    def ended(self, shipment: Shipment | None, error: TransferError | None) -> None:
        """Report the result. Called last and once, with either the shipment or the error."""
        ...


@dataclass(eq=False)
class Loading:
    """Served fetch that waits for blocks from a lower tier."""

    handoff: Handoff
    hashes: list[bytes]
    listener: ServedFetchListener
    blocks: list[int]
    num_cached: int  # leading blocks already on the device
    state_slots: list[int]  # slot that a state is loaded to, if the model has recurrent layers
    parts: HeldParts = field(default_factory=HeldParts)  # of the blocks that the query behind the prefix sees

    @property
    def id(self) -> str:
        return self.handoff.id


class ServedFetches:
    """Registry of served fetches. Owned by the step thread.

    Every rank executes its orders in the next step, before any abort.
    """

    def __init__(
        self, blocks: BlockManager, layout: KVLayout, tiers: Tiers[Any], *, failpoint: Failpoint = unobserved
    ) -> None:
        self._blocks = blocks
        self._layout = layout
        self._tiers = tiers
        self._failpoint = failpoint
        self._loading: dict[ServedFetchListener, Loading] = {}
        self._outgoing_transfers: OutgoingTransfers[ServedFetchListener] = OutgoingTransfers(blocks)
        self._listeners: dict[ServedFetchListener, OutgoingTransfer[ServedFetchListener]] = {}
        self._hashes: dict[HandoffKey, list[bytes]] = {}
        self._orders: list[BeginOrder] = []

    def __len__(self) -> int:
        """Return the number of active fetches, including cancelled ones that are still being sent."""
        return len(self._outgoing_transfers) + len(self._loading)

    def give(self, handoff: Handoff, hashes: Sequence[bytes], listener: ServedFetchListener) -> None:
        """Ship the leading cached blocks of `hashes`, up to the handoff's room."""
        self._failpoint(FailpointStage.ASKED, handoff.id)
        if self._outgoing_transfers.knows((handoff.id, handoff.epoch)):
            listener.ended(None, HandoffExpired(f"handoff {handoff.id} is a duplicate"))
            return
        end = min(self._tiers.table.depth(hashes), handoff.max_tokens // self._layout.block_size)
        if not self._load(handoff, list(hashes[:end]), listener):
            self._ship(handoff, hashes, listener)

    def loaded(self, load: Load[Any]) -> bool:
        """Handle a completed load from a lower tier. Returns False if it was not for a served fetch."""
        loading = load.owner
        if not isinstance(loading, Loading):
            return False
        del self._loading[loading.listener]
        loaded_range = slice(loading.num_cached, loading.num_cached + load.num_loaded)
        for block, prefix_hash in zip(loading.blocks[loaded_range], loading.hashes[loaded_range], strict=True):
            self._blocks.fill_block(block, prefix_hash)
        if self._blocks.states and load.is_usable:
            self._blocks.states.fill_slot(loading.state_slots.pop(), loading.hashes[-1])
        self._free(loading)
        self._ship(loading.handoff, loading.hashes, loading.listener)
        return True

    def expired(self, owner: object) -> bool:
        """Ship only the blocks on the device after a load timed out. Returns False if it was not for a fetch."""
        if not isinstance(owner, Loading):
            return False
        self._stop_loading(owner)
        self._ship(owner.handoff, owner.hashes, owner.listener)
        return True

    def _load(self, handoff: Handoff, hashes: list[bytes], listener: ServedFetchListener) -> bool:
        """Start loading blocks from a lower tier. Returns False if there are none, or no room for them."""
        states, windows = self._blocks.states, self._blocks.windows
        if states or windows:
            # Up to the last block that a sequence can continue behind, with checkpoints from any tier.
            hashes = hashes[: self._tiers.table.offer(hashes, compute_block_s=0.0)]
        if windows and (
            len(hashes) * self._layout.block_size != handoff.num_tokens  # see PrefixFetches.begin
            or windows.num_for(handoff.num_tokens) > windows.num_unreserved
        ):
            return False
        if len(hashes) <= self._blocks.match_reusable(hashes) or (states and not states.num_available):
            return False
        to_load = self._blocks.places_without_part(hashes) if windows else None
        if (allocated := self._blocks.allocate(hashes, len(hashes), to_load=to_load)) is None:
            return False
        blocks, num_cached = allocated
        loading = Loading(handoff, hashes, listener, blocks, num_cached, [states.take()] if states else [])
        if windows:
            loading.parts.reserve(windows.num_for(handoff.num_tokens), windows)
            loading.parts.attach(blocks, windows.seen_from(len(blocks)), windows)
        state = (hashes[-1], loading.state_slots[0]) if states else None
        if not self._tiers.begin(loading, hashes[num_cached:], blocks[num_cached:], state=state):
            self._free(loading)
            return False
        self._loading[listener] = loading
        return True

    def _stop_loading(self, loading: Loading) -> None:
        del self._loading[loading.listener]
        pending = self._tiers.cancel(loading)
        loading.blocks, loading.state_slots = (
            [block for block in held if block not in pending] for held in (loading.blocks, loading.state_slots)
        )
        loading.parts.leave_out(pending)
        self._free(loading)

    def _free(self, loading: Loading) -> None:
        if self._blocks.windows:
            loading.parts.release(self._blocks.windows)
        self._blocks.free(loading.blocks + loading.state_slots)

    def _ship(self, handoff: Handoff, hashes: Sequence[bytes], listener: ServedFetchListener) -> None:
        size = self._layout.block_size
        num_blocks = self._blocks.match_reusable(hashes[: handoff.max_tokens // size])
        if windows := self._blocks.windows:
            # See PrefixFetches.begin.
            has_room = parts_of_handoff(handoff, windows) <= windows.num_unreserved
            num_blocks = num_blocks if has_room and num_blocks * size == handoff.num_tokens else 0
        num_tokens = num_blocks * size
        listener.granted(max(num_tokens, handoff.first_token))
        if num_tokens <= handoff.first_token:
            return
        allocated = self._blocks.allocate(hashes[:num_blocks], num_blocks)
        assert allocated, "cached blocks need no free blocks"
        blocks, _ = allocated
        state_slots = [self._blocks.states.hold(hashes[num_blocks - 1])] if self._blocks.states else []
        ranks = sending_ranks(self._layout, num_receivers=len(handoff.ranks))
        outgoing = self._outgoing_transfers.begin(handoff, blocks, state_slots=state_slots, ranks=ranks, owner=listener)
        self._blocks.free(blocks + state_slots)  # the outgoing transfer references them
        self._listeners[listener] = outgoing
        self._hashes[outgoing.key] = list(hashes[:num_blocks])
        self._orders.append(BeginOrder(handoff, blocks, num_tokens, *state_slots))
        self._failpoint(FailpointStage.SERVING_FETCH, handoff.id)

    def cancel(self, listener: ServedFetchListener) -> None:
        """Cancel a fetch. Does nothing if it has ended."""
        if loading := self._loading.get(listener):
            self._stop_loading(loading)
        if outgoing := self._listeners.pop(listener, None):
            self._outgoing_transfers.abort(outgoing, HandoffExpired(f"handoff {outgoing.handoff.id} was cancelled"))

    def shipped(self, rank: int, shipment: Shipment) -> Shipment | None:
        """Record that one rank has ended its part. Returns the combined shipment once it has landed."""
        outgoing = self._outgoing_transfers.ended(rank, shipment)
        if outgoing is None:
            return None
        listener = outgoing.owner
        if outgoing.error and self._listeners.pop(listener, None):
            listener.ended(None, outgoing.error)
        if not outgoing.is_over:
            return None
        hashes = self._hashes.pop(outgoing.key)
        if outgoing.error:
            return None
        self._blocks.spare(hashes)  # evict these first, because another replica holds them too
        if self._listeners.pop(listener, None):
            listener.ended(outgoing.shipment, None)
        return outgoing.shipment

    def take_orders(self) -> list[BeginOrder]:
        """Return and clear the transfers that every rank must begin in the next step."""
        orders, self._orders = self._orders, []
        return orders

    def take_aborts(self) -> list[HandoffKey]:
        """Return and clear the keys of the transfers that the ranks must abort."""
        return self._outgoing_transfers.take_aborts()
