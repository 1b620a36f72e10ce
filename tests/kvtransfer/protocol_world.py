"""Both ends of a handoff without bytes, threads or sockets: the real state machines, joined by a wire that we control.

One decode replica and two prefill replicas, each of several ranks. Whatever is under way (a frame, an answer, an order
to a rank, a message between ranks, a thread in the middle of a read) waits until it is told to go on. Every pool is a
dictionary, so that each write is checked against who owns the block, and each read against what was written there.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from cluster.errors import HandoffExpired, LinkClosed, TransferError
from cluster.handoff import Handoff
from cluster.rpc import transfer_pb2 as pb
from engine.block_manager import BlockManager
from engine.kv_layout import KVLayout
from engine.tiers.tiers import Tiers
from kvtransfer.arrivals import Arrival, Arrivals, ArrivalState
from kvtransfer.departures import Departure, Departures
from kvtransfer.grants import GrantListener, Grants
from kvtransfer.ledger import Landing, Ledger
from kvtransfer.passage import Ending, Key, Outlet, Passage, Shipment
from kvtransfer.plan import HeadCopy, plan_heads, sending_ranks
from kvtransfer.register import Register
from kvtransfer.segment import Segment
from tests.kvtransfer.pull_world import Puller, Want, content_of, hashes_of

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 2, 8, 2
_LAYOUT = KVLayout(model="m", num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=4, block_size=BLOCK_SIZE, dtype="float32")


def layout(tp: int) -> KVLayout:
    return replace(_LAYOUT, tensor_parallel=tp)


@dataclass(eq=False)
class Request:
    """On the decode replica: blocks, and a handoff that fills them."""

    blocks: list[int]
    num_tokens: int
    unopened: set[int]  # ranks that have not said that the handoff is open there; then nobody knows of it
    arrival: Arrival[Request] | None = None
    epoch: int = 0
    is_running: bool = False  # its KV is whole


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
        self.frames: deque[pb.Segment | pb.Commit] = deque()
        self.answers: deque[tuple[Key, str]] = deque()
        self.outlets: dict[Key, Outlet] = {}
        self.failure: TransferError | None = None

    def put(self, outlet: Outlet, item: Segment | Ending) -> None:
        self.jobs.append((outlet, item))

    def forget(self, outlet: Outlet) -> None:
        self.outlets.pop(outlet.key, None)

    def fail(self, reason: str) -> None:
        """The sending side learns of it now; frames under way may still arrive."""
        self.failure = self.failure or LinkClosed(reason)
        for outlet in list(self.outlets.values()):
            outlet.fail(self.failure)

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
            else:
                outlet.fail(HandoffExpired("refused"))

    def _send(self, frame: pb.Segment | pb.Commit) -> None:
        if not self.failure:
            self.frames.append(frame)


class SendingRank:
    def __init__(self, replica: Prefill, rank: int) -> None:
        self.replica, self.rank = replica, rank
        self.pool: dict[int, tuple[str, int]] = {}  # slot → (handoff, position) that was computed there
        self.passages: dict[Key, Passage] = {}
        self.links: dict[int, Link] = {}
        self.orders: deque[Callable[[], None]] = deque()  # of rank 0, carried out one after the other

    def begin(self, job: Job) -> None:
        copies = plan_heads(sender=layout(self.replica.tp), receiver=layout(len(job.handoff.ranks)))
        mine = [copy for copy in copies if copy.sender == self.rank]
        if mine:
            passage = Passage(job.handoff, job.blocks, layout=layout(self.replica.tp), on_shipped=self._shipped)
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
        """What kvtransfer.grants.carry_out does."""
        self.begin(Job(handoff, blocks))
        if passage := self.passages.get((handoff.id, handoff.epoch)):
            for layer in range(NUM_LAYERS):
                passage.layer_ready(layer, 0, num_tokens)
            passage.commit(num_tokens)

    def follow(self) -> None:
        self.orders.popleft()()

    def abort(self, key: Key) -> None:
        if passage := self.passages.get(key):
            passage.abort()

    def check_read(self, passage: Passage, segment: Segment) -> None:
        for position in range(segment.first_token, segment.first_token + segment.num_tokens):
            block = passage.blocks[position // BLOCK_SIZE]
            self.replica.blocks.is_shared(block)  # raises KeyError unless somebody holds it
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            content = self.replica.contents.get(passage.handoff.id, passage.handoff.id)
            assert self.pool.get(slot) == (content, position), "read from a block that is another's by now"

    def _link_to(self, copy: HeadCopy) -> Link:
        link = self.links.get(copy.receiver)
        if link is None or link.failure:
            link = self.links[copy.receiver] = Link(self, self.replica.world.decode.ranks[copy.receiver])
            self.replica.world.links.append(link)
        return link

    def _shipped(self, shipment: Shipment) -> None:
        del self.passages[shipment.handoff, shipment.epoch]
        self.replica.world.post(partial(self.replica.shipped, self.rank, shipment))


class Prefill:
    """What prefill_worker.worker does with its departures and grants."""

    def __init__(self, world: World, tp: int) -> None:
        self.world, self.tp = world, tp
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
            self._order(lambda rank, o=order: rank.grant(handoff, o["blocks"], o["num_tokens"]))

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


class ReceivingRank:
    """The Receiver and its Incomings."""

    def __init__(self, replica: Decode, rank: int) -> None:
        self.replica, self.rank = replica, rank
        self.register: Register[Ledger] = Register()
        self.pool: dict[tuple[int, int, int], tuple[str, int, int]] = {}  # layer, head, slot → handoff, epoch, position

    def open(self, request: pb.OpenRequest) -> None:
        self.register.open(request.handoff, Ledger(request, num_layers=NUM_LAYERS))

    def close(self, handoff: str) -> None:
        if ledger := self.register.close(handoff):
            ledger.close()

    def take(self, frame: pb.Segment | pb.Commit, link: Link) -> None:
        copies = plan_heads(sender=layout(link.sender.replica.tp), receiver=layout(self.replica.tp))
        mine = [copy for copy in copies if copy.receiver == self.rank]
        copy = next(copy for copy in mine if copy.sender == link.sender.rank)
        ledger = self.register.find(frame.handoff)
        if isinstance(frame, pb.Segment):
            if ledger.accept(frame, source=copy.sender):
                self._write(frame, copy)
            return
        landing = ledger.commit(frame, source=copy.sender, num_sources=len(mine))
        link.answers.append(((frame.handoff, frame.epoch), "landed"))
        if landing:
            self.replica.world.post(partial(self.replica.landed, self.rank, landing))

    def _write(self, frame: pb.Segment, copy: HeadCopy) -> None:
        owner = self.replica.owner_of(frame.handoff)
        for position in range(frame.first_token, frame.first_token + frame.num_tokens):
            block = owner[position // BLOCK_SIZE]
            for layer in range(frame.first_layer, frame.first_layer + frame.num_layers):
                for head in range(copy.receiver_head, copy.receiver_head + copy.num_heads):
                    place = (layer, head, block * BLOCK_SIZE + position % BLOCK_SIZE)
                    self.pool[place] = (frame.handoff, frame.epoch, position)


class Decode:
    """What decode_worker.worker does with its arrivals and fetches."""

    def __init__(self, world: World, tp: int) -> None:
        self.world, self.tp = world, tp
        self.blocks = BlockManager(NUM_BLOCKS)
        self.ranks = [ReceivingRank(self, rank) for rank in range(tp)]
        self.arrivals: Arrivals[Request] = Arrivals(
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
        opening = pb.OpenRequest(handoff=id, num_tokens=num_tokens, max_tokens=num_tokens, block_ids=request.blocks)
        self.opened(opening, request)
        request.arrival = self.arrivals.open(opening, owner=request, expires_at=0.0)
        for rank in request.unopened:
            self.world.post(partial(self._open_on, rank, opening, request))
        self.requests.append(request)

    def opened(self, opening: pb.OpenRequest, owner: Request | Want) -> None:
        """The owner's blocks may be written for this handoff."""
        self._openings[opening.handoff] = (owner, list(opening.block_ids))

    def ticket(self, request: Request) -> Handoff:
        """For the next prefill replica that is to fill it."""
        assert request.arrival
        request.epoch += 1
        return Handoff(
            id=request.arrival.id,
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
        """The lease is over, whatever the reason."""
        self.requests.remove(request)
        if request.arrival:
            self.arrivals.give_up(request.arrival)
        else:
            self.blocks.free(request.blocks)

    def landed(self, rank: int, landing: Landing) -> None:
        if pull := self.puller.pulls.landed(rank, landing):
            self.puller.landed(pull)
        if arrival := self.arrivals.landed(rank, landing):
            request = arrival.owner
            request.arrival, request.is_running = None, True
            self.check_whole(request, arrival.id)

    def check_whole(self, request: Request | Want, handoff: str) -> None:
        """Every position of every head is there, and on each rank all of it from one sender."""
        for rank in self.ranks:
            found = [
                rank.pool.get(
                    (layer, head, request.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
                )
                for layer in range(NUM_LAYERS)
                for head in range(layout(self.tp).heads_per_rank)
                for position in range(request.num_tokens)
            ]
            positions = [*range(request.num_tokens)] * (len(found) // request.num_tokens)
            epochs = {content[1] for content in found if content}
            assert len(epochs) == 1, f"written by {epochs}"
            assert found == [(handoff, *epochs, position) for position in positions]

    def owner_of(self, handoff: str) -> list[int]:
        """The blocks that may be written for a handoff at this moment."""
        request, blocks = self._openings[handoff]
        assert not request.is_running, "a write after the handoff was whole"
        arrival = request.arrival
        assert arrival and arrival.state in (ArrivalState.OPEN, ArrivalState.CLOSING), "a write after it was closed"
        tables = [*self.requests, *self.puller.wants]
        others = {block for other in tables if other is not request for block in other.blocks}
        assert others.isdisjoint(blocks), "a write into the blocks of another request"
        assert set(self.blocks._free).isdisjoint(blocks), "a write into a block that anybody may take"
        return blocks

    def _open_on(self, rank: int, opening: pb.OpenRequest, request: Request) -> None:
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


class World:
    """All of it. `post` is a message within a replica: it comes once or twice, and in any order."""

    def __init__(self, *, prefill_tp: int, decode_tp: int) -> None:
        self.prefill_tp, self.decode_tp = prefill_tp, decode_tp
        self.ids = itertools.count()
        self.links: list[Link] = []
        self.messages: list[Callable[[], None]] = []
        self.decode = Decode(self, decode_tp)
        self.prefills = [Prefill(self, prefill_tp) for _ in range(2)]
        self._turn = 0

    def post(self, message: Callable[[], None]) -> None:
        self.messages.append(message)

    def kill_decode(self) -> None:
        """It comes back empty, as another replica."""
        self.messages = [m for m in self.messages if not _belongs_to(m, self.decode)]
        for link in self.links:
            link.frames.clear()
            link.answers.clear()
            link.fail("the receiver is gone")
        for call in self.decode.puller.calls:
            call.cancel()
        self.decode = Decode(self, self.decode_tp)

    def kill_prefill(self, index: int) -> None:
        dead, self.prefills[index] = self.prefills[index], Prefill(self, self.prefill_tp)
        self.messages = [m for m in self.messages if not _belongs_to(m, dead)]
        for call in [call for call in self.decode.puller.calls if call.holder is dead]:
            call.fail()
        for link in self.links:
            if link.sender.replica is dead:
                link.jobs.clear()
                link.reading = None
                link.answers.clear()  # what it has sent may still arrive

    def pending(self) -> list[Callable[[], None]]:
        """Everything that may happen next, in whatever order."""
        events: list[Callable[[], None]] = []
        for prefill in self.prefills:
            events += [partial(prefill.step, job, 3) for job in prefill.jobs]
            events += [rank.follow for rank in prefill.ranks if rank.orders]
        events += [self.tell] if self.messages else []
        for link in self.links:
            events += [link.run_thread] if link.reading or link.jobs else []
            events += [link.deliver] if link.frames else []
            events += [link.answer] if link.answers else []
        return events

    def settle(self) -> None:
        """Let everything go on until nothing is under way."""
        while events := self.pending():
            events[0]()

    def tell(self) -> None:
        """One of the messages, from either end."""
        self._turn += 1
        self.messages.pop(-(self._turn % 2))()

    def check(self) -> None:
        for replica in (self.decode, *self.prefills):
            replica.blocks.check_integrity()

    def check_empty(self) -> None:
        """Nothing is under way, and nothing of it is left."""
        self.check()
        for replica in (self.decode, *self.prefills):
            assert replica.blocks.num_available == NUM_BLOCKS, "blocks leaked"
        assert not len(self.decode.arrivals) and not len(self.decode.puller.pulls)
        assert not any(len(rank.register) for rank in self.decode.ranks), "a handoff is open for ever"
        for prefill in self.prefills:
            assert not len(prefill.departures) and not len(prefill.grants)
            assert not any(rank.passages for rank in prefill.ranks)


def _belongs_to(message: Callable[[], None], replica: Prefill | Decode) -> bool:
    function = message.func if isinstance(message, partial) else message
    owner = getattr(function, "__self__", None)
    return owner is replica or getattr(owner, "replica", None) is replica
