"""Decode replica of the protocol's model test."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from core.types.errors import TransferError
from core.types.handoff import Handoff, PrefixSource
from engine.kv.block_manager import BlockManager
from kvtransfer.protocol.frames import CommitFrame, Opening, SegmentFrame
from kvtransfer.protocol.incoming_transfers import Fetch, IncomingTransfer, IncomingTransfers, PrefixFetches
from kvtransfer.protocol.ledger import Landing, Ledger, Register
from kvtransfer.protocol.plan import HeadCopy, plan_heads
from kvtransfer.protocol.rank_transfer import Shipment
from tests.kvtransfer.protocol.sender_model import BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS, hashes_of, layout, slot_of
from tests.kvtransfer.replicas import handoff_to

if TYPE_CHECKING:
    from tests.kvtransfer.protocol.sender_model import Link, Prefill
    from tests.kvtransfer.protocol.test_protocol import World


@dataclass(eq=False)
class Request:
    """Blocks on the decode replica, and the handoff that fills them."""

    blocks: list[int]
    num_tokens: int
    incoming: IncomingTransfer[Request] | None = None
    is_open: bool = False  # on every rank; until then the handoff is not sent to a peer
    epoch: int = 0
    is_running: bool = False  # its KV is complete


class ReceivingRank:
    """Model of the Receiver and its Incoming objects."""

    def __init__(self, replica: Decode, rank: int) -> None:
        self.replica, self.rank = replica, rank
        self.register: Register[Ledger] = Register()
        self.pool: dict[tuple[int, int, int], tuple[str, int, int]] = {}  # layer, head, slot → handoff, epoch, position

    def open(self, opening: Opening) -> None:
        self.register.open(opening.handoff, Ledger(opening))

    def close(self, handoff: str) -> None:
        if ledger := self.register.close(handoff):
            ledger.close()

    def take(self, frame: SegmentFrame | CommitFrame, link: Link) -> None:
        copies = plan_heads(sender=layout(link.sender.replica.tp), receiver=layout(self.replica.tp))
        mine = [copy for copy in copies if copy.receiver == self.rank]
        copy = next(copy for copy in mine if copy.sender == link.sender.rank)
        ledger = self.register.find(frame.handoff)
        ledger.admit(frame.epoch, sender=link.sender.replica.name)
        if isinstance(frame, SegmentFrame):
            if ledger.accept(frame, copy=copy):
                self._write(frame, copy)
            return
        landing = ledger.commit(frame, copy=copy, num_sources=len(mine))
        link.answers.append(((frame.handoff, frame.epoch), "landed"))
        if landing:
            self.replica.world.post(partial(self.replica.landed, self.rank, landing))

    def _write(self, frame: SegmentFrame, copy: HeadCopy) -> None:
        owner = self.replica.owner_of(frame.handoff)
        segment = frame.segment
        for position in range(segment.first_token, segment.end_token):
            for layer in segment.layers:
                for head in copy.receiver_heads[layer]:
                    self.pool[layer, head, slot_of(owner, position)] = (frame.handoff, frame.epoch, position)


class Decode:
    """Transfer handling of decode_worker.worker."""

    def __init__(self, world: World, tp: int) -> None:
        self.world, self.tp = world, tp
        self.blocks = BlockManager(NUM_BLOCKS)
        self.ranks = [ReceivingRank(self, rank) for rank in range(tp)]
        self.incoming_transfers: IncomingTransfers[Request] = IncomingTransfers(
            self.ranks[0], self.blocks, num_ranks=tp, close_elsewhere=self.close_elsewhere
        )
        self.requests: list[Request] = []
        self._openings: dict[str, tuple[Request | Want, list[int]]] = {}
        self.fetcher = Fetcher(world, self)

    def admit(self, num_tokens: int) -> None:
        taken = self.blocks.allocate([], -(-num_tokens // BLOCK_SIZE))
        if taken is None:
            return
        request = Request(taken[0], num_tokens)
        id = f"h{next(self.world.ids)}"
        opening = Opening(handoff=id, num_tokens=num_tokens, max_tokens=num_tokens, block_ids=tuple(request.blocks))
        request.incoming = self.incoming_transfers.open(opening, owner=request, expires_at=0.0)
        self.requests.append(request)
        self.open_elsewhere(opening, request, partial(setattr, request, "is_open", True))

    def open_elsewhere(self, opening: Opening, owner: Request | Want, then: Callable[[], None]) -> None:
        """Allow writes of this handoff to the owner's blocks on every rank, and run `then` once each has opened it."""
        self._openings[opening.handoff] = (owner, list(opening.block_ids))
        unopened = set(range(1, self.tp))
        for rank in range(1, self.tp):
            self.world.post(partial(self._open_on, rank, opening, unopened, then))
        if not unopened:
            then()

    def ticket(self, request: Request) -> Handoff:
        """Create a ticket for the next prefill replica."""
        assert request.incoming
        request.epoch += 1
        ranks = [str(rank) for rank in range(self.tp)]
        return handoff_to(ranks, request.num_tokens, id=request.incoming.id, epoch=request.epoch)

    def end(self, request: Request) -> None:
        """End the lease."""
        self.requests.remove(request)
        if request.incoming:
            self.incoming_transfers.give_up(request.incoming)
        else:
            self.blocks.free(request.blocks)

    def landed(self, rank: int, landing: Landing) -> None:
        if fetch := self.fetcher.prefix_fetches.landed(rank, landing):
            self.fetcher.landed(fetch)
        if incoming := self.incoming_transfers.landed(rank, landing):
            request = incoming.owner
            request.incoming, request.is_running = None, True
            self.check_whole(request, incoming.id)

    def check_whole(self, request: Request | Want, handoff: str) -> None:
        """Assert that every position of every head is present, on each rank from one sender."""
        for rank in self.ranks:
            found = [
                rank.pool.get((layer, head, slot_of(request.blocks, position)))
                for layer in range(NUM_LAYERS)
                for head in range(layout(self.tp).heads[layer].num_heads)
                for position in range(request.num_tokens)
            ]
            positions = [*range(request.num_tokens)] * (len(found) // request.num_tokens)
            epochs = {content[1] for content in found if content}
            assert len(epochs) == 1, f"written by {epochs}"
            assert found == [(handoff, *epochs, position) for position in positions]

    def owner_of(self, handoff: str) -> list[int]:
        """Return the blocks that a handoff may write now."""
        request, blocks = self._openings[handoff]
        assert not request.is_running, "a write after the handoff was complete"
        tables = [*self.requests, *self.fetcher.wants]
        others = {block for other in tables if other is not request for block in other.blocks}
        assert others.isdisjoint(blocks), "a write into the blocks of another request"
        assert self._free_blocks().isdisjoint(blocks), "a write into a free block"
        return blocks

    def _free_blocks(self) -> set[int]:
        """Return the free blocks, by allocating and freeing them."""
        taken = self.blocks.allocate([], self.blocks.num_free)
        assert taken
        self.blocks.free(taken[0])
        return set(taken[0])

    def _open_on(self, rank: int, opening: Opening, unopened: set[int], then: Callable[[], None]) -> None:
        self.ranks[rank].open(opening)
        unopened.discard(rank)
        if not unopened:
            then()

    def close_elsewhere(self, handoff: str, then: Callable[[], None]) -> None:
        waiting = set(range(1, self.tp))

        def close_on(rank: int) -> None:
            self.ranks[rank].close(handoff)
            waiting_before = bool(waiting)
            waiting.discard(rank)
            if waiting_before and not waiting:
                then()

        for rank in range(1, self.tp):
            self.world.post(partial(close_on, rank))


@dataclass(eq=False)
class Want:
    """Blocks on the decode replica whose content is fetched."""

    prefix: int
    blocks: list[int]
    num_tokens: int = 0  # received
    is_running: bool = False  # received completely; no more writes


class Call:
    """Call from the fetching replica to the source. Messages arrive late, or never if the other end is dead."""

    def __init__(self, fetcher: Fetcher, fetch: Fetch[Want], prefix_source: Prefill) -> None:
        self.fetcher, self.fetch, self.prefix_source = fetcher, fetch, prefix_source

    def ask(self) -> None:
        if self.prefix_source not in self.fetcher.world.prefills:  # the source has died
            self.fail()
            return
        handoff = self.fetch.handoff
        self.fetcher.world.post(partial(self.prefix_source.serve_fetch, handoff, self.fetch.owner.prefix, self))

    def cancel(self) -> None:
        self.fetcher.world.post(partial(self.prefix_source.end_serving, self))

    def served(self, num_tokens: int) -> None:
        if num_tokens <= self.fetch.handoff.first_token:
            self.fail()

    def ended(self, shipment: Shipment | None, error: TransferError | None) -> None:
        if error:
            self.fail()

    def fail(self) -> None:
        self.fetcher.world.post(partial(self.fetcher.missed, self.fetch))


class Fetcher:
    """Fetch handling of both workers, without the waiting prompts."""

    def __init__(self, world: World, replica: Decode) -> None:
        self.world, self.replica = world, replica
        self.wants: list[Want] = []
        self.calls: list[Call] = []
        self.prefix_fetches: PrefixFetches[Want] = PrefixFetches(
            replica.ranks[0],
            replica.blocks,
            replica="d",
            addresses=[str(rank) for rank in range(replica.tp)],
            layout=layout(replica.tp),
            timeout_s=1.0,
            close_elsewhere=replica.close_elsewhere,
            call=self._call,
        )
        self._prefix_source: Prefill | None = None

    def want(self, prefix: int, num_blocks: int, prefix_source: Prefill) -> None:
        taken = self.replica.blocks.allocate([], num_blocks)
        if taken is None:
            return
        want = Want(prefix, taken[0])
        self.wants.append(want)
        self._prefix_source = prefix_source
        reported = PrefixSource(replica=prefix_source.name, address="p", num_tokens=num_blocks * 2)
        hashes = hashes_of(prefix)[:num_blocks]
        self.prefix_fetches.begin(
            want, reported, id=f"r{next(self.world.ids)}", hashes=hashes, blocks=want.blocks, first_block=0, now=0.0
        )

    def landed(self, fetch: Fetch[Want]) -> None:
        want = fetch.owner
        want.num_tokens, want.is_running = fetch.num_tokens, True
        self.replica.check_whole(want, fetch.handoff.id)

    def missed(self, fetch: Fetch[Want]) -> None:
        if self.prefix_fetches.missed(fetch):
            self._free(fetch.owner)

    def expire(self) -> None:
        for fetch in self.prefix_fetches.expired(math.inf):
            self._free(fetch.owner)

    def end(self, want: Want) -> None:
        """Cancel a fetch."""
        self.prefix_fetches.cancel(want)
        self._free(want)

    def _free(self, want: Want) -> None:
        """Free the blocks of a landed fetch. Otherwise the cancelled transfer has taken them over."""
        self.wants.remove(want)
        if want.is_running:
            self.replica.blocks.free(want.blocks)

    def _call(self, fetch: Fetch[Want]) -> Call:
        assert self._prefix_source
        call = Call(self, fetch, self._prefix_source)
        self.calls.append(call)
        self.replica.open_elsewhere(fetch.incoming.opening, fetch.owner, call.ask)
        return call
