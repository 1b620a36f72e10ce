"""Model of both ends of a handoff without bytes, threads or sockets: real state machines, joined by a controlled wire.

One decode replica and two prefill replicas, each of several ranks. Every pending event (frame, answer, order to a rank,
message between ranks, thread in a read) waits until the test runs it. Every pool is a dictionary, so that each write is
checked against the block's owner, and each read against the content written before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from tests.kvtransfer.protocol.receiving_world import Decode
from tests.kvtransfer.protocol.sending_world import NUM_BLOCKS, Link, Prefill


class World:
    """All replicas and links. `post` queues a message within a replica, delivered once or twice and in any order."""

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
        assert not len(self.decode.incoming_transfers) and not len(self.decode.fetcher.prefix_fetches)
        assert not any(len(rank.register) for rank in self.decode.ranks), "a handoff is open for ever"
        for prefill in self.prefills:
            assert not len(prefill.outgoing_transfers) and not len(prefill.served_fetches)
            assert not any(rank.transfers for rank in prefill.ranks)


def _belongs_to(message: Callable[[], None], replica: Prefill | Decode) -> bool:
    function = message.func if isinstance(message, partial) else message
    owner = getattr(function, "__self__", None)
    return owner is replica or getattr(owner, "replica", None) is replica
