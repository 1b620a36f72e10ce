"""The prefill replicas of the protocol's world, and the links on which their ranks send."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from core.types.errors import HandoffExpired, LinkClosed, TransferError
from core.types.handoff import Handoff, HandoffKey
from engine.kv.block_manager import BlockManager
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.frames import CommitFrame, SegmentFrame
from kvtransfer.protocol.outgoing_transfers import Departure, Departures
from kvtransfer.protocol.plan import HeadCopy, plan_heads, sending_ranks
from kvtransfer.protocol.rank_transfer import Ending, Outlet, Passage, Shipment
from kvtransfer.protocol.segment import Segment
from kvtransfer.transfer.serve_fetches import GrantListener, Grants
from tests.kvtransfer.protocol.pools import BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS, layout
from tests.kvtransfer.protocol.pull_world import content_of, hashes_of

if TYPE_CHECKING:
    from tests.kvtransfer.protocol.protocol_world import World
    from tests.kvtransfer.protocol.receiving_world import ReceivingRank


@dataclass(eq=False)
class Job:
    """On a prefill replica: a prompt that is computed for a handoff."""

    handoff: Handoff
    blocks: list[int]
    departure: Departure[Job] | None = None
    num_computed: int = 0
    is_wanted: bool = True


class Link:
    """From one sending rank to one receiving rank: what its thread has to do, and what is on the wire."""

    def __init__(self, sender: SendingRank, receiver: ReceivingRank) -> None:
        self.sender, self.receiver = sender, receiver
        self.jobs: deque[tuple[Outlet, Segment | Ending]] = deque()
        self.reading: tuple[Outlet, Segment] | None = None  # the thread is inside a read
        self.frames: deque[SegmentFrame | CommitFrame] = deque()
        self.answers: deque[tuple[HandoffKey, str]] = deque()
        self.outlets: dict[HandoffKey, Outlet] = {}
        self.failure: TransferError | None = None

    def put(self, outlet: Outlet, item: Segment | Ending) -> None:
        self.jobs.append((outlet, item))

    def abort(self, outlet: Outlet, error: TransferError) -> None:
        outlet.fail(error)
        self._changed(outlet)

    def fail(self, reason: str) -> None:
        """The sending side learns of it now; frames under way may still arrive."""
        self.failure = self.failure or LinkClosed(reason)
        for outlet in list(self.outlets.values()):
            self.abort(outlet, self.failure)

    def run_thread(self) -> None:
        """The thread takes its next job; it may stop in the middle of a read."""
        if self.reading:
            self._finish_read()
        else:
            self._start_job()

    def _start_job(self) -> None:
        outlet, item = self.jobs.popleft()
        if isinstance(item, Ending):
            if not outlet.is_ended:
                self._send(outlet.announce_commit(item))
        elif outlet.start_reading():
            self.reading = (outlet, item)
        else:
            outlet.num_sent += 1

    def _finish_read(self) -> None:
        assert self.reading
        (outlet, segment), self.reading = self.reading, None
        self.sender.check_read(outlet.passage, segment)
        outlet.stop_reading()
        self._changed(outlet)
        outlet.num_sent += 1
        if not outlet.is_ended:
            self._send(outlet.announce(segment, num_bytes=1, checksum=hash((outlet.key, segment)) % 2**64))

    def deliver(self) -> None:
        """The receiving rank's thread takes the next frame."""
        frame = self.frames.popleft()
        try:
            self.receiver.take(frame, self)
        except TransferError:
            self.answers.append(((frame.handoff, frame.epoch), "refused"))

    def answer(self) -> None:
        key, kind = self.answers.popleft()
        if outlet := self.outlets.get(key):
            if kind == "landed":
                outlet.landed()
                self._changed(outlet)
            else:
                self.abort(outlet, HandoffExpired("refused"))

    def _changed(self, outlet: Outlet) -> None:
        if outlet.is_ended:
            self.outlets.pop(outlet.key, None)
        if outlet.is_over:
            self.sender.check_over(outlet.passage)

    def _send(self, frame: SegmentFrame | CommitFrame) -> None:
        if not self.failure:
            self.frames.append(frame)


class SendingRank:
    def __init__(self, replica: Prefill, rank: int) -> None:
        self.replica, self.rank = replica, rank
        self.pool: dict[int, tuple[str, int]] = {}  # slot → (handoff, position) that was computed there
        self.passages: dict[HandoffKey, Passage] = {}
        self.links: dict[int, Link] = {}
        self.orders: deque[Callable[[], None]] = deque()  # of rank 0, carried out one after the other

    def begin(self, job: Job) -> None:
        copies = plan_heads(sender=layout(self.replica.tp), receiver=layout(len(job.handoff.ranks)))
        mine = [copy for copy in copies if copy.sender == self.rank]
        if mine:
            passage = Passage(job.handoff, job.blocks, layout=layout(self.replica.tp))
            self.passages[passage.key] = passage
            passage.outlets = [Outlet(passage, copy, self._link_to(copy)) for copy in mine]
            for outlet, copy in zip(passage.outlets, mine, strict=True):
                link = self._link_to(copy)
                link.outlets[outlet.key] = outlet

    def compute(self, job: Job, start: int, end: int) -> None:
        for position in range(start, end):
            slot = job.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            self.pool[slot] = (job.handoff.id, position)
        if passage := self.passages.get((job.handoff.id, job.handoff.epoch)):
            for layer in range(NUM_LAYERS):
                passage.layer_ready(layer, start, end)
            if end == job.handoff.num_tokens:
                passage.commit(end, [7] if self.rank == 0 else [])

    def fill(self, prefix: int, blocks: list[int], first_block: int) -> None:
        """It comes to hold blocks of a prefix, whoever computed them."""
        for position in range(first_block * BLOCK_SIZE, len(blocks) * BLOCK_SIZE):
            slot = blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            self.pool[slot] = (content_of(prefix), position)

    def grant(self, handoff: Handoff, blocks: list[int], num_tokens: int) -> None:
        """What worker.gang_runner does with such an order."""
        self.begin(Job(handoff, blocks))
        if passage := self.passages.get((handoff.id, handoff.epoch)):
            passage.all_layers_ready(0, num_tokens)
            passage.commit(num_tokens)

    def follow(self) -> None:
        self.orders.popleft()()

    def abort(self, key: HandoffKey) -> None:
        if passage := self.passages.get(key):
            passage.abort()

    def check_read(self, passage: Passage, segment: Segment) -> None:
        for position in range(segment.first_token, segment.first_token + segment.num_tokens):
            block = passage.blocks[position // BLOCK_SIZE]
            self.replica.blocks.share([block])  # fails unless somebody holds it
            self.replica.blocks.free([block])
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            content = self.replica.contents.get(passage.handoff.id, passage.handoff.id)
            assert self.pool.get(slot) == (content, position), "read from a block that is another's by now"

    def _link_to(self, copy: HeadCopy) -> Link:
        link = self.links.get(copy.receiver)
        if link is None or link.failure:
            link = self.links[copy.receiver] = Link(self, self.replica.world.decode.ranks[copy.receiver])
            self.replica.world.links.append(link)
        return link

    def check_over(self, passage: Passage) -> None:
        if not passage.is_over or not self.passages.pop(passage.key, None):
            return
        shipment = passage.shipment(now=0.0)
        self.replica.world.post(partial(self.replica.shipped, self.rank, shipment))


class Prefill:
    """What prefill_worker.worker does with its departures and grants."""

    def __init__(self, world: World, tp: int) -> None:
        self.world, self.tp = world, tp
        self.name = f"prefill-{next(world.ids)}"
        self.blocks = BlockManager(NUM_BLOCKS)
        self.departures: Departures[Job] = Departures(self.blocks)
        no_tiers: Tiers[object] = Tiers(self.blocks, None, layout(tp), eviction="lru", timeout_s=1.0)
        self.grants = Grants(self.blocks, layout(tp), no_tiers)
        self.contents: dict[str, str] = {}  # of grants' handoffs: which prefix
        self.ranks = [SendingRank(self, rank) for rank in range(tp)]
        self.jobs: list[Job] = []
        self.is_alive = True

    def give(self, handoff: Handoff) -> None:
        taken = self.blocks.allocate([], -(-handoff.num_tokens // BLOCK_SIZE))
        if taken:
            self.jobs.append(Job(handoff, taken[0]))

    def step(self, job: Job, num_tokens: int) -> None:
        """One chunk of one prompt, and whatever has to be aborted."""
        start, end = job.num_computed, min(job.num_computed + num_tokens, job.handoff.num_tokens)
        if job.departure is None:
            ranks = sending_ranks(layout(self.tp), num_receivers=len(job.handoff.ranks))
            job.departure = self.departures.begin(job.handoff, job.blocks, ranks=ranks, owner=job)
            self._order(lambda rank: rank.begin(job))
        self._order(lambda rank: rank.compute(job, start, end))
        job.num_computed = end
        if end == job.handoff.num_tokens:
            self._release(job)

    def hold(self, prefix: int, num_blocks: int) -> None:
        """It has the leading blocks of a prefix in its cache from now on, or until they are evicted."""
        hashes = hashes_of(prefix)[:num_blocks]
        if taken := self.blocks.allocate(hashes, num_blocks):
            blocks, num_cached = taken
            self._order(lambda rank: rank.fill(prefix, blocks, num_cached))
            for block, prefix_hash in zip(blocks, hashes, strict=True):
                self.blocks.seal(block, prefix_hash)
            self.blocks.free(blocks)

    def grant(self, handoff: Handoff, prefix: int, listener: GrantListener) -> None:
        self.contents[handoff.id] = content_of(prefix)
        self.grants.give(handoff, hashes_of(prefix), listener)
        for order in self.grants.take_orders():
            self._order(lambda rank, o=order: rank.grant(handoff, o.blocks, o.num_tokens))

    def ungrant(self, listener: GrantListener) -> None:
        self.grants.cancel(listener)
        self.order_aborts()

    def cancel(self, job: Job) -> None:
        self._stop(job, HandoffExpired("not wanted"))

    def order_aborts(self) -> None:
        for key in self.departures.take_aborts() + self.grants.take_aborts():
            self._order(lambda rank, key=key: rank.abort(key))

    def shipped(self, rank: int, shipment: Shipment) -> None:
        self.grants.shipped(rank, shipment)
        if (departure := self.departures.ended(rank, shipment)) and departure.error:
            self._stop(departure.owner, departure.error)
        self.order_aborts()

    def _stop(self, job: Job, error: TransferError) -> None:
        job.is_wanted = False
        self._release(job)
        if job.departure:
            self.departures.abort(job.departure, error)
        self.world.post(self.order_aborts)

    def _release(self, job: Job) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
            self.blocks.free(job.blocks)

    def _order(self, order: Callable[[SendingRank], None]) -> None:
        """Rank 0 acts at once, the others in their time and in this order."""
        order(self.ranks[0])
        for rank in self.ranks[1:]:
            rank.orders.append(partial(order, rank))
