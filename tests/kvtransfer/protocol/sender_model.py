"""Prefill replicas of the protocol's model test, and the links of their ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from core.types.errors import HandoffExpired, LinkClosed, TransferError
from core.types.handoff import Handoff, HandoffKey
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.frames import CommitFrame, Segment, SegmentFrame
from kvtransfer.protocol.outgoing_transfers import OutgoingTransfer, OutgoingTransfers
from kvtransfer.protocol.plan import HeadCopy, plan_heads
from kvtransfer.protocol.rank_transfer import LinkTransfer, RankTransfer, Shipment
from kvtransfer.transfer.serve_fetches import ServedFetches, ServedFetchListener

if TYPE_CHECKING:
    from tests.kvtransfer.protocol.receiver_model import ReceivingRank
    from tests.kvtransfer.protocol.test_protocol import World

# Small pools, so that they are nearly always full.
BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 2, 8, 2
# Two ranks split the first layer's heads and replicate the second's, so a link may carry one layer only.
_LAYOUT = KVLayout(
    model="m", num_layers=NUM_LAYERS, num_kv_heads=(2, 1), head_dim=(4, 8), block_size=BLOCK_SIZE, dtype="float32"
)
MAX_BLOCKS = 3  # of a fetched prefix


def layout(tp: int) -> KVLayout:
    return replace(_LAYOUT, tensor_parallel=tp)


def hashes_of(prefix: int) -> list[bytes]:
    return [b"prefix %d block %2d" % (prefix, i) for i in range(MAX_BLOCKS)]


def slot_of(blocks: Sequence[int], position: int) -> int:
    return blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def content_of(prefix: int) -> str:
    return f"prefix {prefix}"


@dataclass(eq=False)
class Job:
    """A prompt that a prefill replica computes for a handoff."""

    handoff: Handoff
    blocks: list[int]
    outgoing: OutgoingTransfer[Job] | None = None
    num_computed: int = 0


class Link:
    """Link from one sending rank to one receiving rank: jobs of its thread, and frames on the wire."""

    def __init__(self, sender: SendingRank, receiver: ReceivingRank) -> None:
        self.sender, self.receiver = sender, receiver
        self.jobs: deque[tuple[LinkTransfer, Segment | CommitFrame]] = deque()
        self.reading: tuple[LinkTransfer, Segment] | None = None  # the thread is in a read
        self.frames: deque[SegmentFrame | CommitFrame] = deque()
        self.answers: deque[tuple[HandoffKey, str]] = deque()
        self.link_transfers: dict[HandoffKey, LinkTransfer] = {}
        self.failure: TransferError | None = None

    def put(self, link_transfer: LinkTransfer, item: Segment | CommitFrame) -> None:
        self.jobs.append((link_transfer, item))

    def abort(self, link_transfer: LinkTransfer, error: TransferError) -> None:
        link_transfer.fail(error)
        self._changed(link_transfer)

    def fail(self, reason: str) -> None:
        """Fail the link at the sending side. Frames on the wire may still arrive."""
        self.failure = self.failure or LinkClosed(reason)
        for link_transfer in list(self.link_transfers.values()):
            self.abort(link_transfer, self.failure)

    def run_thread(self) -> None:
        """Run the thread's next job, which may stop in the middle of a read."""
        if self.reading:
            self._finish_read()
        else:
            self._start_job()

    def _start_job(self) -> None:
        link_transfer, item = self.jobs.popleft()
        if isinstance(item, CommitFrame):
            if not link_transfer.is_ended:
                self._send(link_transfer.announce_commit(item))
        elif link_transfer.start_reading():
            self.reading = (link_transfer, item)

    def _finish_read(self) -> None:
        assert self.reading
        (link_transfer, segment), self.reading = self.reading, None
        self.sender.check_read(link_transfer.transfer, segment)
        link_transfer.stop_reading()
        self._changed(link_transfer)
        if not link_transfer.is_ended:
            checksum = hash((link_transfer.key, segment)) % 2**64
            self._send(link_transfer.announce(segment, num_bytes=1, checksum=checksum))

    def deliver(self) -> None:
        """Deliver the next frame to the receiving rank."""
        frame = self.frames.popleft()
        try:
            self.receiver.take(frame, self)
        except TransferError:
            self.answers.append(((frame.handoff, frame.epoch), "rejected"))

    def answer(self) -> None:
        key, kind = self.answers.popleft()
        if link_transfer := self.link_transfers.get(key):
            if kind == "landed":
                link_transfer.landed()
                self._changed(link_transfer)
            else:
                self.abort(link_transfer, HandoffExpired("rejected"))

    def _changed(self, link_transfer: LinkTransfer) -> None:
        if link_transfer.is_ended:
            self.link_transfers.pop(link_transfer.key, None)
        if link_transfer.is_over:
            self.sender.check_over(link_transfer.transfer)

    def _send(self, frame: SegmentFrame | CommitFrame) -> None:
        if not self.failure:
            self.frames.append(frame)


class SendingRank:
    def __init__(self, replica: Prefill, rank: int) -> None:
        self.replica, self.rank = replica, rank
        self.pool: dict[int, tuple[str, int]] = {}  # slot → (handoff, position) that was computed there
        self.transfers: dict[HandoffKey, RankTransfer] = {}
        self.links: dict[int, Link] = {}
        self.orders: deque[Callable[[], None]] = deque()  # from rank 0, executed in order

    def begin(self, job: Job) -> None:
        copies = plan_heads(sender=layout(self.replica.tp), receiver=layout(len(job.handoff.ranks)))
        mine = [copy for copy in copies if copy.sender == self.rank]
        if mine:
            transfer = RankTransfer(job.handoff, job.blocks, layout=layout(self.replica.tp))
            self.transfers[transfer.key] = transfer
            for copy in mine:
                link = self._link_to(copy)
                link.link_transfers[transfer.key] = LinkTransfer(transfer, copy, link)
                transfer.link_transfers.append(link.link_transfers[transfer.key])

    def compute(self, job: Job, start: int, end: int) -> None:
        for position in range(start, end):
            self.pool[slot_of(job.blocks, position)] = (job.handoff.id, position)
        if transfer := self.transfers.get(job.handoff.key):
            for layer in range(NUM_LAYERS):
                transfer.layer_ready(layer, start, end)
            if end == job.handoff.num_tokens:
                transfer.commit(end, [7] if self.rank == 0 else [])

    def fill(self, prefix: int, blocks: list[int], first_block: int) -> None:
        """Write blocks of a prefix into the pool."""
        for position in range(first_block * BLOCK_SIZE, len(blocks) * BLOCK_SIZE):
            self.pool[slot_of(blocks, position)] = (content_of(prefix), position)

    def serve_fetch(self, handoff: Handoff, blocks: list[int], num_tokens: int) -> None:
        """Execute the order as worker.gang_runner does."""
        self.begin(Job(handoff, blocks))
        if transfer := self.transfers.get(handoff.key):
            transfer.all_layers_ready(0, num_tokens)
            transfer.commit(num_tokens)

    def follow(self) -> None:
        self.orders.popleft()()

    def abort(self, key: HandoffKey) -> None:
        if transfer := self.transfers.get(key):
            transfer.abort()

    def check_read(self, transfer: RankTransfer, segment: Segment) -> None:
        for position in range(segment.first_token, segment.end_token):
            block = transfer.blocks[position // BLOCK_SIZE]
            self.replica.blocks.share([block])  # fails unless the block is referenced
            self.replica.blocks.free([block])
            content = self.replica.contents.get(transfer.handoff.id, transfer.handoff.id)
            found = self.pool.get(slot_of(transfer.blocks, position))
            assert found == (content, position), "read from a block that was reused"

    def _link_to(self, copy: HeadCopy) -> Link:
        link = self.links.get(copy.receiver)
        if link is None or link.failure:
            link = self.links[copy.receiver] = Link(self, self.replica.world.decode.ranks[copy.receiver])
            self.replica.world.links.append(link)
        return link

    def check_over(self, transfer: RankTransfer) -> None:
        if not transfer.is_over or not self.transfers.pop(transfer.key, None):
            return
        shipment = transfer.shipment(now=0.0)
        self.replica.world.post(partial(self.replica.shipped, self.rank, shipment))


class Prefill:
    """Transfer and served-fetch handling of prefill_worker.worker."""

    def __init__(self, world: World, tp: int) -> None:
        self.world, self.tp = world, tp
        self.name = f"prefill-{next(world.ids)}"
        self.blocks = BlockManager(NUM_BLOCKS)
        self.outgoing_transfers: OutgoingTransfers[Job] = OutgoingTransfers(self.blocks, layout(tp))
        no_tiers: Tiers[object] = Tiers(self.blocks, None, layout(tp), eviction="lru", timeout_s=1.0)
        self.served_fetches = ServedFetches(self.blocks, layout(tp), no_tiers)
        self.contents: dict[str, str] = {}  # served fetches: prefix by handoff id
        self.ranks = [SendingRank(self, rank) for rank in range(tp)]
        self.jobs: list[Job] = []

    def give(self, handoff: Handoff) -> None:
        taken = self.blocks.allocate([], -(-handoff.num_tokens // BLOCK_SIZE))
        if taken:
            self.jobs.append(Job(handoff, taken[0]))

    def step(self, job: Job, num_tokens: int) -> None:
        """Compute one chunk of one prompt, and send pending aborts."""
        start, end = job.num_computed, min(job.num_computed + num_tokens, job.handoff.num_tokens)
        if job.outgoing is None:
            job.outgoing = self.outgoing_transfers.begin(job.handoff, job.blocks, owner=job)
            self._order(lambda rank: rank.begin(job))
        self._order(lambda rank: rank.compute(job, start, end))
        job.num_computed = end
        if end == job.handoff.num_tokens:
            self._release(job)

    def hold(self, prefix: int, num_blocks: int) -> None:
        """Cache the leading blocks of a prefix. They may be evicted later."""
        hashes = hashes_of(prefix)[:num_blocks]
        if taken := self.blocks.allocate(hashes, num_blocks):
            blocks, num_cached = taken
            self._order(lambda rank: rank.fill(prefix, blocks, num_cached))
            for block, prefix_hash in zip(blocks, hashes, strict=True):
                self.blocks.fill_block(block, prefix_hash)
            self.blocks.free(blocks)

    def serve_fetch(self, handoff: Handoff, prefix: int, listener: ServedFetchListener) -> None:
        self.contents[handoff.id] = content_of(prefix)
        self.served_fetches.serve(handoff, hashes_of(prefix), listener)
        for order in self.served_fetches.take_orders():
            self._order(lambda rank, o=order: rank.serve_fetch(handoff, o.blocks, o.num_tokens))

    def end_serving(self, listener: ServedFetchListener) -> None:
        self.served_fetches.cancel(listener)
        self.order_aborts()

    def cancel(self, job: Job) -> None:
        self._stop(job, HandoffExpired("cancelled"))

    def order_aborts(self) -> None:
        for key in self.outgoing_transfers.take_aborts() + self.served_fetches.take_aborts():
            self._order(lambda rank, key=key: rank.abort(key))

    def shipped(self, rank: int, shipment: Shipment) -> None:
        self.served_fetches.shipped(rank, shipment)
        if (outgoing := self.outgoing_transfers.ended(rank, shipment)) and outgoing.error:
            self._stop(outgoing.owner, outgoing.error)
        self.order_aborts()

    def _stop(self, job: Job, error: TransferError) -> None:
        self._release(job)
        if job.outgoing:
            self.outgoing_transfers.abort(job.outgoing, error)
        self.world.post(self.order_aborts)

    def _release(self, job: Job) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
            self.blocks.free(job.blocks)

    def _order(self, order: Callable[[SendingRank], None]) -> None:
        """Execute an order on rank 0 at once, and queue it for the other ranks."""
        order(self.ranks[0])
        for rank in self.ranks[1:]:
            rank.orders.append(partial(order, rank))
