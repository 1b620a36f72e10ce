"""The receiving end of a rank's links."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import torch

from cluster.rpc import transfer_pb2 as pb
from cluster.words.errors import LayoutMismatch, LinkClosed, TransferError
from engine.kv.pool import KVPool
from kvtransfer.links.backends import open_link
from kvtransfer.links.link import MEET_TIMEOUT_S, Link, LinkEnd, operation_timeout
from kvtransfer.movers.codec import WIRE_VERSION, codec_for
from kvtransfer.movers.incoming import Incoming
from kvtransfer.movers.lane import own_lane
from kvtransfer.movers.meeting import Meeting, local_store
from kvtransfer.movers.staging import StagingRing
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.plan import HeadCopy, plan_heads
from kvtransfer.protocol.register import Register
from kvtransfer.protocol.segment import Segment

logger = logging.getLogger(__name__)


class Receiver:
    """Accepts links and writes what they bring into the blocks that were opened for it.

    `open` and `close` may be called from any thread. `on_landed` is called from link threads, once per handoff and
    epoch.
    """

    def __init__(
        self,
        *,
        rank: int,
        pool: KVPool,
        wire_dtype: str,
        backend: str,
        host: str,
        timeout_s: float,
        meeting: Meeting,
        on_landed: Callable[[Landing], None],
    ) -> None:
        self.rank = rank
        self.pool = pool
        self.wire_dtype = wire_dtype
        self.backend = backend
        self.codec = codec_for(pool.layout, wire_dtype)
        self.host = host
        self.timeout_s = timeout_s
        self.on_landed = on_landed
        self.meeting = meeting
        self._incoming: Register[Incoming] = Register()

    def open(self, request: pb.OpenRequest) -> None:
        """Allow a handoff to fill the blocks named, unless it has been closed already."""
        self._incoming.open(request.handoff, Incoming(request, pool=self.pool, codec=self.codec))

    def close(self, handoff: str) -> None:
        """End a handoff, also before it is opened. When this returns, nothing of it is written any more."""
        if incoming := self._incoming.close(handoff):
            incoming.close()

    def find(self, handoff: str) -> Incoming:
        """Raises HandoffExpired."""
        return self._incoming.find(handoff)

    async def connect(self, frames: AsyncIterator[pb.SenderFrame]) -> AsyncIterator[pb.ReceiverFrame]:
        """One link's conversation: the body of the Connect call. Ends when the sender ends it or the link fails."""
        hello = (await anext(frames)).hello
        try:
            copy, num_sources = self._admit(hello)
        except LayoutMismatch as error:
            yield pb.ReceiverFrame(refused=pb.Refused(reason=str(error)))
            return
        prefix = f"{hello.sender}>{self.rank}#{hello.epoch}/{uuid4().hex}"
        link = _IncomingLink(self, hello, prefix=prefix, copy=copy, num_sources=num_sources)
        yield pb.ReceiverFrame(welcome=pb.Welcome(prefix=prefix))
        async for frame in link.converse(frames):
            yield frame

    def _admit(self, hello: pb.Hello) -> tuple[HeadCopy, int]:
        """What this sender brings to this rank, and how many senders bring something."""
        layout = self.pool.layout
        ours = (WIRE_VERSION, layout.fingerprint, self.wire_dtype, self.backend)
        theirs = (hello.wire_version, hello.layout, hello.wire_dtype, hello.backend)
        names = ("wire version", "KV layout", "wire dtype", "link backend")
        for name, our, their in zip(names, ours, theirs, strict=True):
            if our != their:
                raise LayoutMismatch(f"{hello.sender} has {name} {their!r}, this rank has {our!r}")
        copies = plan_heads(sender=replace(layout, tensor_parallel=hello.sender_ranks), receiver=layout)
        mine = [copy for copy in copies if copy.receiver == self.rank]
        if copy := next((copy for copy in mine if copy.sender == hello.sender_rank), None):
            return copy, len(mine)
        raise LayoutMismatch(f"rank {hello.sender_rank} of {hello.sender_ranks} has nothing for rank {self.rank}")

    def link_end(self, prefix: str) -> LinkEnd:
        return LinkEnd(
            store=local_store(self.meeting, timeout_s=MEET_TIMEOUT_S),
            prefix=prefix,
            is_sender=False,
            host=self.host,
            device=self.pool.device,
            timeout_s=MEET_TIMEOUT_S,
        )


class _IncomingLink:
    """One link's thread: it receives each announced payload, in order, and answers."""

    def __init__(self, receiver: Receiver, hello: pb.Hello, *, prefix: str, copy: HeadCopy, num_sources: int) -> None:
        self._receiver = receiver
        self._backend = hello.backend
        self._prefix = prefix
        self._copy = copy
        self._num_sources = num_sources
        self._announced: queue.SimpleQueue[pb.SenderFrame | None] = queue.SimpleQueue()
        self._answers: asyncio.Queue[pb.ReceiverFrame | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._has_ended = False  # the conversation; then the link fails, which is no news
        self._refused: tuple[str, int] | None = None  # the last handoff refused: say so once, not per segment

    async def converse(self, frames: AsyncIterator[pb.SenderFrame]) -> AsyncIterator[pb.ReceiverFrame]:
        thread = threading.Thread(target=self._run, name=f"kv-recv-{self._prefix}", daemon=True)
        thread.start()
        listener = asyncio.create_task(self._listen(frames))
        try:
            while (answer := await self._answers.get()) is not None:
                yield answer
        finally:
            listener.cancel()
            self._has_ended = True
            self._announced.put(None)
            if self._link:
                self._link.close()
            self._receiver.meeting.forget(self._prefix)

    async def _listen(self, frames: AsyncIterator[pb.SenderFrame]) -> None:
        async for frame in frames:
            self._announced.put(frame)
        self._answers.put_nowait(None)

    def _run(self) -> None:
        try:
            with own_lane(self._receiver.pool.device):
                self._link = link = open_link(self._backend, self._receiver.link_end(self._prefix))
                self._receive(link, StagingRing(link.device, num_buffers=link.num_buffers))
        except TransferError as error:
            if not self._has_ended:
                logger.warning("link failed prefix=%s: %s", self._prefix, error)
        except Exception:  # the edge of this thread: the sender must hear that nobody listens any more
            logger.exception("link failed prefix=%s", self._prefix)
        finally:
            if self._link:
                self._link.close()
            self._answer(None)

    def _receive(self, link: Link, ring: StagingRing) -> None:
        """Take everything in the order in which it is announced; while one payload is written, the next arrives."""
        begun: deque[tuple[pb.SenderFrame, torch.Tensor | None] | None] = deque()

        def begin_announced() -> None:
            while not begun or (ring.has_room and not self._announced.empty()):
                frame = self._announced.get()
                begun.append(None if frame is None else (frame, self._begin(frame, link, ring)))

        while True:
            begin_announced()
            if (next_one := begun.popleft()) is None:
                return
            frame, payload = next_one
            if payload is None:
                self._guard(frame.commit, self._commit)
                continue
            ring.wait()
            if ring.has_room and (begun or not self._announced.empty()):
                begin_announced()
            self._guard(frame.segment, self._write, payload)
            ring.release()

    def _begin(self, frame: pb.SenderFrame, link: Link, ring: StagingRing) -> torch.Tensor | None:
        """Start to receive what was announced. Where it will be; None for a commit, which has no payload."""
        if frame.WhichOneof("frame") != "segment":
            return None
        num_bytes = self._expected_bytes(frame.segment)
        payload = ring.take(num_bytes)
        timeout_s = operation_timeout(self._receiver.timeout_s, num_bytes)
        ring.start(link.recv(payload), timeout_s=timeout_s)
        return payload

    def _expected_bytes(self, announced: pb.Segment) -> int:
        """What the segment says of its size must follow from its place, or the two sides do not speak of the same."""
        segment = Segment(
            first_layer=announced.first_layer,
            num_layers=announced.num_layers,
            first_token=announced.first_token,
            num_tokens=announced.num_tokens,
            first_head=self._copy.receiver_head,
            num_heads=self._copy.num_heads,
        )
        if self._receiver.codec.num_bytes(segment) != announced.num_bytes:
            raise LinkClosed(f"handoff {announced.handoff}: {announced.num_bytes} bytes are no {segment}")
        return announced.num_bytes

    def _write(self, segment: pb.Segment, payload: torch.Tensor) -> None:
        self._receiver.find(segment.handoff).write(segment, payload, copy=self._copy)

    def _commit(self, commit: pb.Commit) -> None:
        landing = self._receiver.find(commit.handoff).commit(commit, copy=self._copy, num_sources=self._num_sources)
        self._answer(pb.ReceiverFrame(landed=pb.Landed(handoff=commit.handoff, epoch=commit.epoch)))
        if landing:
            self._receiver.on_landed(landing)

    def _guard(self, frame: Any, action: Callable[..., None], *args: Any) -> None:
        """A handoff that is refused does not end the link: others share it."""
        try:
            action(frame, *args)
        except TransferError as error:
            if self._refused != (frame.handoff, frame.epoch):
                self._refused = (frame.handoff, frame.epoch)
                refused = pb.Refused(handoff=frame.handoff, epoch=frame.epoch, reason=str(error))
                self._answer(pb.ReceiverFrame(refused=refused))

    def _answer(self, frame: pb.ReceiverFrame | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._answers.put_nowait, frame)
        except RuntimeError:
            pass  # the loop has ended, and with it the call
