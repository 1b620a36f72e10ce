"""Receiver of one rank: incoming links and open handoffs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from uuid import uuid4

from core.identity.rules import key_of_link
from core.rpc import transfer_pb2 as pb
from core.types.errors import CapacityError, ClusterError, LayoutMismatch
from core.types.failpoint import FailpointStage
from core.types.validation import check_name
from core.types.wire_version import WIRE_VERSION
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.plan import HeadCopy, plan_heads
from kvtransfer.protocol.register import Register
from kvtransfer.protocol.validation import check_opening, check_ranks
from kvtransfer.transfer.incoming import Incoming
from kvtransfer.transfer.incoming_link import IncomingLink
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.rendezvous import Rendezvous

logger = logging.getLogger(__name__)

_MAX_OPEN = 65_536  # handoffs
_MAX_LINKS = 1024  # one thread each
_MAX_CLOSED = 4096  # closed handoffs whose payloads may still be in flight
_HELLO_S = 10.0


class Receiver:
    """Accepts links and writes their payloads into opened blocks.

    `open` and `close` are thread-safe. `on_landed` is called from link threads, once per handoff and epoch.
    """

    def __init__(self, config: LinkConfig, *, rendezvous: Rendezvous, on_landed: Callable[[Landing], None]) -> None:
        self.config = config
        self._codec = config.codec
        self._rendezvous = rendezvous
        self._on_landed = on_landed
        self._incoming: Register[Incoming] = Register()
        self._closed_ends: OrderedDict[str, int] = OrderedDict()  # see end_of
        self._lock = threading.Lock()  # guards the two fields above
        self._threads = threading.BoundedSemaphore(_MAX_LINKS)  # slots for link threads

    def checked(self, opening: Opening) -> Opening:
        """Return `opening` if it fits this rank's pool. Raises RequestError."""
        pool = self.config.pool
        check_opening(opening, pool.layout, num_blocks=pool.num_blocks, num_states=pool.num_states)
        return opening

    def open(self, opening: Opening) -> None:
        """Allow a handoff to fill the opening's blocks, unless it was closed earlier.

        Openings from other processes must be `checked` first. Raises TransferError for blocks outside the pool,
        CapacityError if too many handoffs are open.
        """
        incoming = Incoming(opening, pool=self.config.pool, codec=self._codec)
        with self._lock:
            if len(self._incoming) >= _MAX_OPEN:
                raise CapacityError(f"limit of {_MAX_OPEN} open handoffs reached")
            self._incoming.open(opening.handoff, incoming)
        self.config.failpoint(FailpointStage.OPENED, opening.handoff)

    def close(self, handoff: str) -> None:
        """Close a handoff, even one not opened yet. After return, nothing of it is written."""
        with self._lock:
            incoming = self._incoming.close(handoff)
            if incoming:
                self._closed_ends[handoff] = incoming.end_token
            if len(self._closed_ends) > _MAX_CLOSED:
                self._closed_ends.popitem(last=False)
        if incoming:
            incoming.close()

    def close_all(self) -> None:
        """Close every open handoff. After return, nothing of any of them is written."""
        with self._lock:
            handoffs = self._incoming.handoffs
        for handoff in handoffs:
            self.close(handoff)

    def end_of(self, handoff: str) -> int:
        """Return the end position of a handoff that is or was open; 0 if it is unknown."""
        with self._lock:
            incoming = self._incoming.get(handoff)
            return incoming.end_token if incoming else self._closed_ends.get(handoff, 0)

    def find(self, handoff: str) -> Incoming:
        """Return an open handoff. Raises HandoffExpired."""
        with self._lock:
            return self._incoming.find(handoff)

    def landed(self, landing: Landing) -> None:
        """Report that a handoff is complete on this rank. Called by the links."""
        self.config.failpoint(FailpointStage.LANDED, landing.handoff)
        self._on_landed(landing)

    async def connect(self, frames: AsyncIterator[pb.SenderFrame]) -> AsyncIterator[pb.ReceiverFrame]:
        """Serve one Connect call: admit the sender, then run its link until the call ends or the link fails."""
        try:
            async with asyncio.timeout(_HELLO_S):
                first = await anext(frames)
            copy, num_sources = self._admit(first.hello)
        except (TimeoutError, StopAsyncIteration):
            return
        except ClusterError as error:
            yield pb.ReceiverFrame(rejected=pb.Rejected(reason=str(error)))
            return
        prefix = key_of_link(first.hello.sender, receiver=self.config.rank, epoch=first.hello.epoch, unique=uuid4().hex)
        link = IncomingLink(
            self,
            self.config,
            self._rendezvous,
            prefix=prefix,
            sender=first.hello.sender.rpartition("/")[0],
            copy=copy,
            num_sources=num_sources,
            ended=self._threads.release,
        )
        try:
            yield pb.ReceiverFrame(welcome=pb.Welcome(prefix=prefix))
            async for frame in link.converse(frames):
                yield frame
        finally:
            if not link.has_begun:
                self._threads.release()

    def _admit(self, hello: pb.Hello) -> tuple[HeadCopy, int]:
        """Check a sender and acquire a thread slot for its link.

        Returns the heads that it sends to this rank, and the number of ranks that send to this rank. Raises
        RequestError, CapacityError and LayoutMismatch, which names the differing parameter but not its value here.
        """
        check_name(hello.sender, "hello.sender")
        config, layout = self.config, self.config.pool.layout
        ours = (WIRE_VERSION, layout.fingerprint, config.wire_dtype, config.mode)
        theirs = (hello.wire_version, hello.layout, hello.wire_dtype, hello.backend)
        names = ("wire version", "KV layout", "wire dtype", "link backend")
        for name, our, their in zip(names, ours, theirs, strict=True):
            if our != their:
                logger.warning("link rejected sender=%s: %s is %.100r, expected %r", hello.sender, name, their, our)
                raise LayoutMismatch(f"{name} of {hello.sender} differs from this rank's")
        check_ranks(hello.sender_ranks, layout, "hello.sender_ranks")
        copies = plan_heads(sender=replace(layout, tensor_parallel=hello.sender_ranks), receiver=layout)
        mine = [copy for copy in copies if copy.receiver == config.rank]
        if copy := next((copy for copy in mine if copy.sender == hello.sender_rank), None):
            if not self._threads.acquire(blocking=False):
                raise CapacityError(f"limit of {_MAX_LINKS} incoming links reached")
            return copy, len(mine)
        raise LayoutMismatch(f"rank {hello.sender_rank} of {hello.sender_ranks} sends no heads to rank {config.rank}")
