"""Model test of the handoff protocol (docs/HANDOFF.md) under random events in every state.

Checked after every event: each block is in one state; a handoff writes only blocks that it owns at that moment, and
reads no block that was reused (asserted by the model at each access); a complete handoff was filled by one sender per
rank. At the end no block is held.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.types.errors import LinkClosed, TransferError
from engine.kv.block_manager import BlockManager
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.serve_fetches import ServedFetches
from tests.kvtransfer.protocol.receiver_model import Decode, Request
from tests.kvtransfer.protocol.sender_model import (
    BLOCK_SIZE,
    MAX_BLOCKS,
    NUM_BLOCKS,
    Job,
    Link,
    Prefill,
    hashes_of,
    layout,
)
from tests.kvtransfer.replicas import handoff_to


class World:
    """Model of both ends of a handoff without bytes, threads or sockets: real state machines on a controlled wire.

    One decode replica and two prefill replicas, each of several ranks. Every pending event (frame, answer, order to a
    rank, message between ranks, thread in a read) waits until the test runs it. `post` queues a message within a
    replica, delivered once or twice and in any order.
    """

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
        """Replace the decode replica by a new, empty one."""
        self.messages = [m for m in self.messages if not _belongs_to(m, self.decode)]
        for link in self.links:
            link.frames.clear()
            link.answers.clear()
            link.fail("the receiver is gone")
        for call in self.decode.fetcher.calls:
            call.cancel()
        self.decode = Decode(self, self.decode_tp)

    def kill_prefill(self, index: int) -> None:
        dead, self.prefills[index] = self.prefills[index], Prefill(self, self.prefill_tp)
        self.messages = [m for m in self.messages if not _belongs_to(m, dead)]
        for call in [call for call in self.decode.fetcher.calls if call.prefix_source is dead]:
            call.fail()
        for link in self.links:
            if link.sender.replica is dead:
                link.jobs.clear()
                link.reading = None
                link.answers.clear()  # frames already sent may still arrive

    def pending(self) -> list[Callable[[], None]]:
        """Return all events that may happen next, in any order."""
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
        """Run events until none is pending."""
        while events := self.pending():
            events[0]()

    def tell(self) -> None:
        """Deliver one message, alternating between the newest and the oldest."""
        self._turn += 1
        self.messages.pop(-(self._turn % 2))()

    def check(self) -> None:
        for replica in (self.decode, *self.prefills):
            replica.blocks.check_integrity()

    def check_empty(self) -> None:
        """Assert that nothing is pending and no state is left."""
        self.check()
        for replica in (self.decode, *self.prefills):
            assert replica.blocks.num_available == NUM_BLOCKS, "blocks leaked"
        assert not self.decode.incoming_transfers.expired(math.inf)
        assert not self.decode.fetcher.prefix_fetches.expired(math.inf)
        assert not any(len(rank.register) for rank in self.decode.ranks), "a handoff is open for ever"
        for prefill in self.prefills:
            assert not len(prefill.outgoing_transfers) and not len(prefill.served_fetches)
            assert not any(rank.transfers for rank in prefill.ranks)


def _belongs_to(message: Callable[[], None], replica: Prefill | Decode) -> bool:
    function = message.func if isinstance(message, partial) else message
    owner = getattr(function, "__self__", None)
    return owner is replica or getattr(owner, "replica", None) is replica


_RANDOM = st.randoms(use_true_random=False)


class Protocol(RuleBasedStateMachine):
    """State machine whose rules play the router, timeouts and faults."""

    world: World

    @initialize(prefill_tp=st.sampled_from([1, 2]), decode_tp=st.sampled_from([1, 2]))
    def deploy(self, prefill_tp: int, decode_tp: int) -> None:
        self.world = World(prefill_tp=prefill_tp, decode_tp=decode_tp)

    @rule(num_tokens=st.integers(1, 7), prefill=st.integers(0, 1))
    def ask(self, num_tokens: int, prefill: int) -> None:
        self.world.decode.admit(num_tokens)
        self.go_on(num_events=self.world.decode_tp, random=Random(num_tokens))
        if requests := self._open_requests():
            self.world.prefills[prefill].give(self.world.decode.ticket(requests[-1]))

    @precondition(lambda self: self._open_requests())
    @rule(random=_RANDOM, prefill=st.integers(0, 1))
    def give_to_another_prefill_replica(self, random: Random, prefill: int) -> None:
        request = random.choice(self._open_requests())
        self.world.prefills[prefill].give(self.world.decode.ticket(request))

    @rule(prefix=st.integers(0, 1), num_blocks=st.integers(1, MAX_BLOCKS), prefill=st.integers(0, 1))
    def hold_a_prefix(self, prefix: int, num_blocks: int, prefill: int) -> None:
        self.world.prefills[prefill].hold(prefix, num_blocks)

    @rule(
        prefix=st.integers(0, 1),
        num_held=st.integers(0, MAX_BLOCKS),
        num_blocks=st.integers(1, MAX_BLOCKS),
        prefill=st.integers(0, 1),
    )
    def fetch(self, prefix: int, num_held: int, num_blocks: int, prefill: int) -> None:
        """Fetch a prefix from a source that may hold fewer blocks than reported."""
        prefix_source = self.world.prefills[prefill]
        prefix_source.hold(prefix, num_held)
        self.world.decode.fetcher.want(prefix, num_blocks, prefix_source)

    @precondition(lambda self: self.world.decode.fetcher.wants)
    @rule(random=_RANDOM, is_late=st.booleans())
    def end_a_fetch(self, random: Random, is_late: bool) -> None:
        fetcher = self.world.decode.fetcher
        if is_late:
            fetcher.expire()
        else:
            fetcher.end(random.choice(fetcher.wants))

    @rule(num_events=st.integers(1, 12), random=_RANDOM)
    def go_on(self, num_events: int, random: Random) -> None:
        """Run some pending events, except for those of one stopped thread."""
        threads = [link.run_thread for link in self.world.links]
        stopped = random.choice([None, self.world.tell, *threads])
        for _ in range(num_events):
            if events := [event for event in self.world.pending() if event != stopped]:
                random.choice(events)()

    @rule(num_events=st.integers(20, 80), random=_RANDOM)
    def go_on_for_long(self, num_events: int, random: Random) -> None:
        self.go_on(num_events=num_events, random=random)

    @precondition(lambda self: self.world.decode.requests)
    @rule(random=_RANDOM)
    def end_a_lease(self, random: Random) -> None:
        self.world.decode.end(random.choice(self.world.decode.requests))

    @precondition(lambda self: self._jobs())
    @rule(random=_RANDOM)
    def end_a_prefill_call(self, random: Random) -> None:
        prefill, job = random.choice(self._jobs())
        prefill.cancel(job)

    @precondition(lambda self: self.world.links)
    @rule(random=_RANDOM, is_cut=st.booleans())
    def break_a_link(self, random: Random, is_cut: bool) -> None:
        """Fail a link. Its frames on the wire are lost or arrive late."""
        link = random.choice(self.world.links)
        if is_cut:
            link.frames.clear()
        link.answers.clear()
        link.fail("broken")

    @precondition(lambda self: self._links_with_frames())
    @rule(random=_RANDOM, how=st.sampled_from(["lose", "repeat", "reorder"]))
    def disturb_the_wire(self, random: Random, how: str) -> None:
        frames = random.choice(self._links_with_frames()).frames
        if how == "lose":
            frames.popleft()
        elif how == "repeat":
            frames.appendleft(frames[0])
        else:
            frames.rotate(1)

    @precondition(lambda self: self.world.messages)
    @rule(random=_RANDOM)
    def tell_twice(self, random: Random) -> None:
        """Repeat a message within a replica, as a retry does."""
        random.choice(self.world.messages)()

    @rule(random=_RANDOM)
    def kill(self, random: Random) -> None:
        """Kill a replica rarely, so that handoffs can complete."""
        index = random.randrange(15)
        if index == 2:
            self.world.kill_decode()
        elif index < 2:
            self.world.kill_prefill(index)

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """End all requests and check that no state is left."""
        if not hasattr(self, "world"):
            return
        for request in list(self.world.decode.requests):
            self.world.decode.end(request)
        for want in list(self.world.decode.fetcher.wants):
            self.world.decode.fetcher.end(want)
        for prefill, job in self._jobs():
            prefill.cancel(job)
        self.world.settle()
        for link in self.world.links:
            link.fail("timed out")
        self.world.settle()
        self.world.check_empty()

    def _open_requests(self) -> list[Request]:
        return [request for request in self.world.decode.requests if request.incoming and request.is_open]

    def _jobs(self) -> list[tuple[Prefill, Job]]:
        return [(prefill, job) for prefill in self.world.prefills for job in prefill.jobs]

    def _links_with_frames(self) -> list[Link]:
        return [link for link in self.world.links if link.frames]


_SETTINGS = settings(suppress_health_check=list(HealthCheck), print_blob=True)


def test_protocol_invariants_hold_under_random_events() -> None:
    run_state_machine_as_test(Protocol, settings=settings(_SETTINGS, max_examples=60, stateful_step_count=60))


@pytest.mark.slow
def test_protocol_invariants_hold_under_long_random_runs() -> None:
    run_state_machine_as_test(Protocol, settings=settings(_SETTINGS, max_examples=5000, stateful_step_count=100))


class FakeListener:
    def __init__(self) -> None:
        self.errors: list[TransferError | None] = []

    def served(self, num_tokens: int) -> None:
        pass

    def ended(self, shipment: Shipment | None, error: TransferError | None) -> None:
        self.errors.append(error)


def test_a_prefix_is_not_shipped_twice_under_one_handoff() -> None:
    """A late report of the first transfer would end the second one, and free blocks that are still being read.

    The model test finds this once in five thousand runs.
    """
    blocks = BlockManager(NUM_BLOCKS)
    no_tiers: Tiers[object] = Tiers(blocks, None, layout(1), eviction="lru", timeout_s=1.0)
    served_fetches = ServedFetches(blocks, layout(1), no_tiers)
    held, _ = blocks.allocate([], 2) or ([], 0)
    for block, prefix_hash in zip(held, hashes_of(0), strict=False):
        blocks.fill_block(block, prefix_hash)
    blocks.free(held)
    handoff = handoff_to(["r"], 2 * BLOCK_SIZE)
    failed = Shipment(handoff="h", epoch=1, wire_bytes=0, seconds=0.0, link_s=0.0, error=LinkClosed("gone"))

    first, again = FakeListener(), FakeListener()
    served_fetches.serve(handoff, hashes_of(0), first)
    served_fetches.shipped(0, failed)
    served_fetches.serve(handoff, hashes_of(0), again)
    served_fetches.shipped(0, failed)
    assert [str(error) for error in first.errors] == ["gone"]
    assert [str(error) for error in again.errors] == ["handoff h is a duplicate"]
    assert len(served_fetches.take_orders()) == 1 and not len(served_fetches)
    assert blocks.num_available == NUM_BLOCKS


def test_a_fetch_that_waits_for_a_lower_tier_is_not_served_twice() -> None:
    class SlowTiers:
        table = SimpleNamespace(depth=len, offer=lambda hashes, **_: len(hashes))
        num_loads = 0

        def begin(self, *_: object, **__: object) -> bool:
            self.num_loads += 1
            return True

    tiers: Any = SlowTiers()
    served_fetches = ServedFetches(BlockManager(NUM_BLOCKS), layout(1), tiers)
    first, again = FakeListener(), FakeListener()
    for listener in (first, again):
        served_fetches.serve(handoff_to(["r"], 2 * BLOCK_SIZE), hashes_of(0)[:2], listener)
    assert (tiers.num_loads, first.errors) == (1, [])
    assert [str(error) for error in again.errors] == ["handoff h is a duplicate"]
