"""Serving of prefix fetches: prefixes that a replica ships to other replicas on request, tracked on rank 0.

The leading blocks that are cached here are referenced until they have landed or the fetch is cancelled. Blocks in a
lower tier are loaded first. Serving a fetch computes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpc import aio

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.errors import HandoffExpired, ReplicaLost, TransferError
from core.types.failpoint import Failpoint, FailpointStage, unobserved
from core.types.handoff import Handoff, HandoffKey
from core.types.prefix_hash import HASH_BYTES
from core.types.validation import check
from core.wire.call_errors import aborting
from core.wire.messages import from_message
from core.wire.thread_events import CallEvents
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from engine.kv.window_manager import HeldParts
from engine.scheduler.step_commands import BeginOrder
from engine.tiers.commands import Load
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.outgoing_transfers import OutgoingTransfer, OutgoingTransfers, parts_of_handoff
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.protocol.validation import check_handoff


class ServedFetchListener(Protocol):
    """Observer of one served fetch. Called on the step thread."""

    def served(self, num_tokens: int) -> None:
        """Report the number of leading positions that the receiver will have, including those before the handoff.

        If that adds nothing to the receiver's prefix, the fetch is over and `ended` is not called.
        """
        ...

    def ended(self, shipment: Shipment | None, error: TransferError | None) -> None:
        """Report the result. Called last and once, with either the shipment or the error."""
        ...


@dataclass(eq=False)
class ServedFetch:
    """Fetch of a prefix by another replica. It may wait for blocks from a lower tier first."""

    handoff: Handoff
    hashes: list[bytes]
    listener: ServedFetchListener
    outgoing: OutgoingTransfer[ServedFetch] | None = None  # once it ships
    # Held while blocks are loaded.
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0  # leading blocks already on the device
    state_slots: list[int] = field(default_factory=list)  # slot that a state is loaded to, with recurrent layers
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
        self.layout = layout
        self._blocks = blocks
        self._tiers = tiers
        self._failpoint = failpoint
        self._under_way: dict[ServedFetchListener, ServedFetch] = {}  # with a listener that waits for the end
        self._outgoing_transfers: OutgoingTransfers[ServedFetch] = OutgoingTransfers(blocks, layout)
        self._orders: list[BeginOrder] = []

    def __len__(self) -> int:
        """Return the number of active fetches, including cancelled ones that are still being sent."""
        num_loading = sum(fetch.outgoing is None for fetch in self._under_way.values())
        return len(self._outgoing_transfers) + num_loading

    def serve(self, handoff: Handoff, hashes: Sequence[bytes], listener: ServedFetchListener) -> None:
        """Ship the leading cached blocks of `hashes`, up to the handoff's room."""
        self._failpoint(FailpointStage.ASKED, handoff.id)
        if self._outgoing_transfers.knows(handoff.key):
            listener.ended(None, HandoffExpired(f"handoff {handoff.id} is a duplicate"))
            return
        fetch = ServedFetch(handoff, list(hashes[: handoff.max_tokens // self.layout.block_size]), listener)
        if not self._load(fetch):
            self._ship(fetch)

    def loaded(self, load: Load[Any]) -> bool:
        """Handle a completed load from a lower tier. Returns False if it was not for a served fetch."""
        fetch = load.owner
        if not isinstance(fetch, ServedFetch):
            return False
        loaded_range = slice(fetch.num_cached, fetch.num_cached + load.num_loaded)
        for block, prefix_hash in zip(fetch.blocks[loaded_range], fetch.hashes[loaded_range], strict=True):
            self._blocks.fill_block(block, prefix_hash)
        if self._blocks.states and load.is_usable:
            self._blocks.states.fill_slot(fetch.state_slots.pop(), fetch.hashes[-1])
        self._free(fetch)
        self._ship(fetch)
        return True

    def expired(self, owner: object) -> bool:
        """Ship only the blocks on the device after a load timed out. Returns False if it was not for a fetch."""
        if not isinstance(owner, ServedFetch):
            return False
        self._stop_loading(owner)
        self._ship(owner)
        return True

    def _load(self, fetch: ServedFetch) -> bool:
        """Start loading blocks from a lower tier. Returns False if there are none, or no room for them."""
        states, windows = self._blocks.states, self._blocks.windows
        hashes, handoff = fetch.hashes[: self._tiers.table.depth(fetch.hashes)], fetch.handoff
        if states or windows:
            # Stop at the last block behind which a sequence can continue, with checkpoints from any tier.
            hashes = hashes[: self._tiers.table.offer(hashes, compute_block_s=0.0)]
        if windows and (
            len(hashes) * self.layout.block_size != handoff.num_tokens  # see PrefixFetches.begin
            or windows.num_for(handoff.num_tokens) > windows.num_unreserved
        ):
            return False
        if len(hashes) <= self._blocks.match_reusable(hashes) or (states and not states.num_available):
            return False
        to_load = self._blocks.places_without_part(hashes) if windows else None
        if (allocated := self._blocks.allocate(hashes, len(hashes), to_load=to_load)) is None:
            return False
        fetch.blocks, fetch.num_cached = allocated
        fetch.state_slots = [states.take()] if states else []
        if windows:
            fetch.parts.reserve(windows.num_for(handoff.num_tokens), windows)
            fetch.parts.attach(fetch.blocks, windows.seen_from(len(fetch.blocks)), windows)
        state = (hashes[-1], fetch.state_slots[0]) if states else None
        if not self._tiers.begin(fetch, hashes[fetch.num_cached :], fetch.blocks[fetch.num_cached :], state=state):
            self._free(fetch)
            return False
        fetch.hashes = hashes
        self._outgoing_transfers.claim(handoff.key)
        self._under_way[fetch.listener] = fetch
        return True

    def _stop_loading(self, fetch: ServedFetch) -> None:
        pending = self._tiers.cancel(fetch)
        fetch.blocks, fetch.state_slots = (
            [block for block in held if block not in pending] for held in (fetch.blocks, fetch.state_slots)
        )
        fetch.parts.leave_out(pending)
        self._free(fetch)

    def _free(self, fetch: ServedFetch) -> None:
        """Free what was held for loading."""
        if self._blocks.windows:
            fetch.parts.release(self._blocks.windows)
        self._blocks.free(fetch.blocks + fetch.state_slots)
        self._outgoing_transfers.release(fetch.handoff.key)

    def _ship(self, fetch: ServedFetch) -> None:
        handoff, listener, size = fetch.handoff, fetch.listener, self.layout.block_size
        self._under_way.pop(listener, None)
        num_blocks = self._blocks.match_reusable(fetch.hashes)
        if windows := self._blocks.windows:
            # See PrefixFetches.begin.
            has_room = parts_of_handoff(handoff, windows) <= windows.num_unreserved
            num_blocks = num_blocks if has_room and num_blocks * size == handoff.num_tokens else 0
        num_tokens = num_blocks * size
        listener.served(max(num_tokens, handoff.first_token))
        if num_tokens <= handoff.first_token:
            return
        fetch.hashes = fetch.hashes[:num_blocks]
        allocated = self._blocks.allocate(fetch.hashes, num_blocks)
        assert allocated, "cached blocks need no free blocks"
        blocks, _ = allocated
        state_slots = [self._blocks.states.hold(fetch.hashes[-1])] if self._blocks.states else []
        fetch.outgoing = self._outgoing_transfers.begin(handoff, blocks, state_slots=state_slots, owner=fetch)
        self._blocks.free(blocks + state_slots)  # the outgoing transfer references them
        self._under_way[listener] = fetch
        self._orders.append(BeginOrder(handoff, blocks, num_tokens, *state_slots))
        self._failpoint(FailpointStage.SERVING_FETCH, handoff.id)

    def cancel(self, listener: ServedFetchListener) -> None:
        """Cancel a fetch. Does nothing if it has ended."""
        if fetch := self._under_way.pop(listener, None):
            if fetch.outgoing:
                error = HandoffExpired(f"handoff {fetch.id} was cancelled")
                self._outgoing_transfers.abort(fetch.outgoing, error)
            else:
                self._stop_loading(fetch)

    def shipped(self, rank: int, shipment: Shipment) -> Shipment | None:
        """Record that one rank has ended its part. Returns the combined shipment once it has landed."""
        outgoing = self._outgoing_transfers.ended(rank, shipment)
        if outgoing is None:
            return None
        fetch = outgoing.owner
        if outgoing.error:
            if self._under_way.pop(fetch.listener, None):
                fetch.listener.ended(None, outgoing.error)
            return None
        if not outgoing.is_over:
            return None
        self._blocks.spare(fetch.hashes)  # evict these first, because another replica holds them too
        if self._under_way.pop(fetch.listener, None):
            fetch.listener.ended(outgoing.shipment, None)
        return outgoing.shipment

    def take_orders(self) -> list[BeginOrder]:
        """Return and clear the transfers that every rank must begin in the next step."""
        orders, self._orders = self._orders, []
        return orders

    def take_aborts(self) -> list[HandoffKey]:
        """Return and clear the keys of the transfers that the ranks must abort."""
        return self._outgoing_transfers.take_aborts()


class FetchServicer(rpc.PrefixFetchServicer):
    """Servicer on the source replica, one call per prefix. Serves once `served_fetches` is set.

    `post` runs a command on the step thread, which owns `served_fetches`.
    """

    def __init__(self) -> None:
        self.served_fetches: ServedFetches | None = None
        self.post: Callable[[Callable[[], None]], None] = lambda command: None

    async def Fetch(
        self, request: pb.FetchRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.FetchEvent]:
        async with aborting(context):
            served_fetches, post = self.served_fetches, self.post
            if served_fetches is None:
                raise ReplicaLost("this replica is not ready to serve fetches")
            handoff, layout = from_message(Handoff, request.handoff), served_fetches.layout
            check_handoff(handoff, layout)
            num_bytes = len(request.hashes)
            is_whole = num_bytes * layout.block_size == handoff.max_tokens * HASH_BYTES
            check(is_whole, "hashes", "must reach to max_tokens")
            hashes = [request.hashes[i : i + HASH_BYTES] for i in range(0, num_bytes, HASH_BYTES)]
            call = _FetchCall(handoff.first_token)
            post(lambda: served_fetches.serve(handoff, hashes, call))
            try:
                async for event in call.events:
                    yield event
            finally:
                post(lambda: served_fetches.cancel(call))


class _FetchCall:
    """Listener that passes events of a served fetch from the step thread to its gRPC call."""

    def __init__(self, first_token: int) -> None:
        self.events: CallEvents[pb.FetchEvent] = CallEvents()
        self._first_token = first_token

    def served(self, num_tokens: int) -> None:
        self.events.put(pb.FetchEvent(served=pb.FetchServed(num_tokens=num_tokens)))
        if num_tokens <= self._first_token:
            self.events.end()

    def ended(self, shipment: Shipment | None, error: TransferError | None) -> None:
        if shipment:
            shipped = pb.Shipped(wire_bytes=shipment.wire_bytes, seconds=shipment.seconds)
            self.events.put(pb.FetchEvent(shipped=shipped))
        self.events.end(error)
