"""Decode replica of the protocol's model test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from core.types.handoff import Handoff
from engine.kv.block_manager import BlockManager
from kvtransfer.protocol.frames import CommitFrame, Opening, SegmentFrame
from kvtransfer.protocol.incoming_transfers import IncomingTransfer, IncomingTransfers, IncomingTransferState
from kvtransfer.protocol.ledger import Landing, Ledger
from kvtransfer.protocol.plan import HeadCopy, plan_heads
from kvtransfer.protocol.register import Register
from tests.kvtransfer.protocol.pools import BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS, layout
from tests.kvtransfer.protocol.pull_world import Puller, Want

if TYPE_CHECKING:
    from tests.kvtransfer.protocol.protocol_world import World
    from tests.kvtransfer.protocol.sending_world import Link


@dataclass(eq=False)
class Request:
    """Blocks on the decode replica, and the handoff that fills them."""

    blocks: list[int]
    num_tokens: int
    unopened: set[int]  # ranks on which the handoff is not open yet; until then it is not sent to a peer
    incoming: IncomingTransfer[Request] | None = None
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
            block = owner[position // BLOCK_SIZE]
            for layer in segment.layers:
                for head in copy.receiver_heads[layer]:
                    place = (layer, head, block * BLOCK_SIZE + position % BLOCK_SIZE)
                    self.pool[place] = (frame.handoff, frame.epoch, position)


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
        self.is_alive = True
        self._openings: dict[str, tuple[Request | Want, list[int]]] = {}
        self.puller = Puller(world, self)

    def admit(self, num_tokens: int) -> None:
        taken = self.blocks.allocate([], -(-num_tokens // BLOCK_SIZE))
        if taken is None:
            return
        request = Request(taken[0], num_tokens, set(range(1, self.tp)))
        id = f"h{next(self.world.ids)}"
        opening = Opening(handoff=id, num_tokens=num_tokens, max_tokens=num_tokens, block_ids=tuple(request.blocks))
        self.opened(opening, request)
        request.incoming = self.incoming_transfers.open(opening, owner=request, expires_at=0.0)
        for rank in request.unopened:
            self.world.post(partial(self._open_on, rank, opening, request))
        self.requests.append(request)

    def opened(self, opening: Opening, owner: Request | Want) -> None:
        """Allow writes of this handoff to the owner's blocks."""
        self._openings[opening.handoff] = (owner, list(opening.block_ids))

    def ticket(self, request: Request) -> Handoff:
        """Create a ticket for the next prefill replica."""
        assert request.incoming
        request.epoch += 1
        return Handoff(
            id=request.incoming.id,
            epoch=request.epoch,
            replica="d",
            ranks=tuple(str(rank) for rank in range(self.tp)),
            layout="",
            num_tokens=request.num_tokens,
            max_tokens=request.num_tokens,
            first_token=0,
            ttl_s=1.0,
        )

    def end(self, request: Request) -> None:
        """End the lease."""
        self.requests.remove(request)
        if request.incoming:
            self.incoming_transfers.give_up(request.incoming)
        else:
            self.blocks.free(request.blocks)

    def landed(self, rank: int, landing: Landing) -> None:
        if fetch := self.puller.prefix_fetches.landed(rank, landing):
            self.puller.landed(fetch)
        if incoming := self.incoming_transfers.landed(rank, landing):
            request = incoming.owner
            request.incoming, request.is_running = None, True
            self.check_whole(request, incoming.id)

    def check_whole(self, request: Request | Want, handoff: str) -> None:
        """Assert that every position of every head is present, on each rank from one sender."""
        for rank in self.ranks:
            found = [
                rank.pool.get(
                    (layer, head, request.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
                )
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
        incoming = request.incoming
        assert incoming and incoming.state in (IncomingTransferState.OPEN, IncomingTransferState.CLOSING), (
            "a write after it was closed"
        )
        tables = [*self.requests, *self.puller.wants]
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

    def _open_on(self, rank: int, opening: Opening, request: Request) -> None:
        self.ranks[rank].open(opening)
        request.unopened.discard(rank)

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
