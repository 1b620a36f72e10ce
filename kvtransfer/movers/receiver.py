"""The receiving end of a rank's links."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from uuid import uuid4

from cluster.rpc import transfer_pb2 as pb
from cluster.words.errors import LayoutMismatch
from cluster.words.probe import Milestone
from kvtransfer.movers.codec import WIRE_VERSION
from kvtransfer.movers.incoming import Incoming
from kvtransfer.movers.incoming_link import IncomingLink
from kvtransfer.movers.link_config import LinkConfig
from kvtransfer.movers.meeting import Meeting
from kvtransfer.protocol.frames import Opening
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.plan import HeadCopy, plan_heads
from kvtransfer.protocol.register import Register


class Receiver:
    """Accepts links and writes what they bring into the blocks that were opened for it.

    `open` and `close` may be called from any thread. `on_landed` is called from link threads, once per handoff and
    epoch.
    """

    def __init__(self, config: LinkConfig, *, meeting: Meeting, on_landed: Callable[[Landing], None]) -> None:
        self.config = config
        self._codec = config.codec
        self._meeting = meeting
        self._on_landed = on_landed
        self._incoming: Register[Incoming] = Register()
        self._lock = threading.Lock()  # the register's

    def open(self, opening: Opening) -> None:
        """Allow a handoff to fill the blocks named, unless it has been closed already."""
        incoming = Incoming(opening, pool=self.config.pool, codec=self._codec)
        with self._lock:
            self._incoming.open(opening.handoff, incoming)
        self.config.probe(Milestone.OPENED, opening.handoff)

    def close(self, handoff: str) -> None:
        """End a handoff, also before it is opened. When this returns, nothing of it is written any more."""
        with self._lock:
            incoming = self._incoming.close(handoff)
        if incoming:
            incoming.close()

    def find(self, handoff: str) -> Incoming:
        """Raises HandoffExpired."""
        with self._lock:
            return self._incoming.find(handoff)

    def landed(self, landing: Landing) -> None:
        """For its links: a handoff is whole on this rank."""
        self.config.probe(Milestone.LANDED, landing.handoff)
        self._on_landed(landing)

    async def connect(self, frames: AsyncIterator[pb.SenderFrame]) -> AsyncIterator[pb.ReceiverFrame]:
        """One link's conversation: the body of the Connect call. Ends when the sender ends it or the link fails."""
        hello = (await anext(frames)).hello
        try:
            copy, num_sources = self._admit(hello)
        except LayoutMismatch as error:
            yield pb.ReceiverFrame(refused=pb.Refused(reason=str(error)))
            return
        prefix = f"{hello.sender}>{self.config.rank}#{hello.epoch}/{uuid4().hex}"
        link = IncomingLink(self, self.config, self._meeting, prefix=prefix, copy=copy, num_sources=num_sources)
        yield pb.ReceiverFrame(welcome=pb.Welcome(prefix=prefix))
        async for frame in link.converse(frames):
            yield frame

    def _admit(self, hello: pb.Hello) -> tuple[HeadCopy, int]:
        """What this sender brings to this rank, and how many senders bring something."""
        config, layout = self.config, self.config.pool.layout
        ours = (WIRE_VERSION, layout.fingerprint, config.wire_dtype, config.backend)
        theirs = (hello.wire_version, hello.layout, hello.wire_dtype, hello.backend)
        names = ("wire version", "KV layout", "wire dtype", "link backend")
        for name, our, their in zip(names, ours, theirs, strict=True):
            if our != their:
                raise LayoutMismatch(f"{hello.sender} has {name} {their!r}, this rank has {our!r}")
        copies = plan_heads(sender=replace(layout, tensor_parallel=hello.sender_ranks), receiver=layout)
        mine = [copy for copy in copies if copy.receiver == config.rank]
        if copy := next((copy for copy in mine if copy.sender == hello.sender_rank), None):
            return copy, len(mine)
        raise LayoutMismatch(f"rank {hello.sender_rank} of {hello.sender_ranks} has nothing for rank {config.rank}")
