"""Receiver of one rank: its open handoffs and incoming links, each a gRPC stream and a thread. The handshake with the
sending rank is checked in Receiver._admit; the peers of a TCP link authenticate in kvtransfer/links/connection.py."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from uuid import uuid4

from torch import Tensor

from core.identity.rules import key_of_link
from core.rpc import transfer_pb2 as pb
from core.types.errors import (
    CapacityError,
    ChecksumMismatch,
    ClusterError,
    LayoutMismatch,
    LinkClosed,
    RequestError,
    TransferError,
)
from core.types.failpoint import FailpointStage
from core.types.validation import check_name
from engine.kv.checksum import checksum
from engine.kv.pool import KVPool
from engine.runner.streams import Event
from kvtransfer.links.link import MEET_TIMEOUT_S, Link, StagingRing, own_stream, stream_event
from kvtransfer.protocol.frames import CommitFrame, Opening, Segment, SegmentFrame, operation_timeout
from kvtransfer.protocol.ledger import Landing, Ledger, Register
from kvtransfer.protocol.plan import HeadCopy, plan_heads
from kvtransfer.protocol.validation import check_commit, check_opening, check_ranks, check_segment
from kvtransfer.transfer.codec import Codec, slots_of, window_slots_of
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.rendezvous import Rendezvous, local_store
from kvtransfer.transfer.wire_messages import frame_from_proto

logger = logging.getLogger(__name__)

_MAX_OPEN = 65_536  # handoffs
_MAX_LINKS = 1024  # one thread each
_MAX_CLOSED = 4096  # closed handoffs whose payloads may still be in flight
_HELLO_S = 10.0
# Fields of a link's greeting that must be equal on both sides.
_AGREED = dict(wire_version="wire version", layout="KV layout", wire_dtype="wire dtype", backend="link backend")
_MAX_ANNOUNCED = 4096  # queued frames per direction: a sender announces only what it is about to send
_MAX_UNWANTED_BYTES = 64 << 20  # a rejected payload must still be received to be discarded

_Frame = SegmentFrame | CommitFrame
_Announced = tuple[_Frame, Tensor | None]  # a frame, and a segment's payload buffer


class Receiver:
    """Accepts links and writes their payloads into opened blocks.

    `open` and `close` are thread-safe. `on_landed` is called from link threads, once per handoff and epoch.
    """

    def __init__(self, config: LinkConfig, *, rendezvous: Rendezvous, on_landed: Callable[[Landing], None]) -> None:
        self.config = config
        self.rendezvous = rendezvous
        self._on_landed = on_landed
        self._incoming: Register[Incoming] = Register()
        self._closed_ends: OrderedDict[str, int] = OrderedDict()  # see end_of
        self._lock = threading.Lock()  # guards the two fields above
        self.threads = threading.BoundedSemaphore(_MAX_LINKS)  # slots for link threads

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
        incoming = Incoming(opening, pool=self.config.pool, codec=self.config.codec)
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
        """Close every open handoff. After return, none of their bytes are written."""
        with self._lock:
            handoffs = list(self._incoming)
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
        async for frame in _IncomingLink(self, first.hello, copy=copy, num_sources=num_sources).converse(frames):
            yield frame

    def _admit(self, hello: pb.Hello) -> tuple[HeadCopy, int]:
        """Check a sender and acquire a thread slot for its link.

        Returns the heads that it sends to this rank, and the number of ranks that send to this rank. Raises
        RequestError, CapacityError and LayoutMismatch, which names the differing parameter but not its value here.
        """
        check_name(hello.sender, "hello.sender")
        config, layout, own = self.config, self.config.pool.layout, self.config.hello(epoch=0)
        for field, name in _AGREED.items():
            if (our := getattr(own, field)) != (their := getattr(hello, field)):
                logger.warning("link rejected sender=%s: %s is %.100r, expected %r", hello.sender, name, their, our)
                raise LayoutMismatch(f"{name} of {hello.sender} differs from this rank's")
        check_ranks(hello.sender_ranks, layout, "hello.sender_ranks")
        copies = plan_heads(sender=replace(layout, tensor_parallel=hello.sender_ranks), receiver=layout)
        mine = [copy for copy in copies if copy.receiver == config.rank]
        if copy := next((copy for copy in mine if copy.sender == hello.sender_rank), None):
            if not self.threads.acquire(blocking=False):
                raise CapacityError(f"limit of {_MAX_LINKS} incoming links reached")
            return copy, len(mine)
        raise LayoutMismatch(f"rank {hello.sender_rank} of {hello.sender_ranks} sends no heads to rank {config.rank}")


class Incoming:
    """Blocks that one handoff may fill on this rank.

    Link threads write, the replica's owner closes. Closing is final: after `close` returns, nothing of this handoff is
    written and its blocks can be reused. The constructor checks the bounds of all slots; it raises TransferError for
    blocks outside the pool.
    """

    def __init__(self, opened: Opening, *, pool: KVPool, codec: Codec) -> None:
        self.handoff = opened.handoff
        self.end_token = opened.max_tokens
        self._first_token = opened.first_token
        layout = pool.layout
        self._window_start = layout.cache.window_start(opened.num_tokens, held=opened.first_token)
        windowed = frozenset(layer for layer in range(layout.num_layers) if layout.is_windowed(layer))
        self._ledger = Ledger(opened, windowed=windowed, window_start=self._window_start)
        self._pool = pool
        self._codec = codec
        assert opened.first_token % pool.layout.block_size == 0, "a handoff begins at a block"
        self._slots_T = slots_of(pool, opened.block_ids, 0, opened.max_tokens - opened.first_token)
        self._window_slots_T = None
        if windowed and opened.max_tokens > self._window_start:
            first_block = (self._window_start - opened.first_token) // layout.block_size
            pool.check_parts(opened.block_ids[first_block:])
            window_span = self._window_start - opened.first_token, opened.max_tokens - self._window_start
            self._window_slots_T = window_slots_of(pool, opened.block_ids, *window_span)
        self._state_index = pool.state_index(opened.state_slots[0]) if opened.state_slots else None
        self._opened = stream_event(pool.device)  # earlier uses of the blocks
        self._written: dict[int, Event] = {}  # last write per sending rank; each link has its own stream
        self._lock = threading.Lock()

    def write(self, frame: SegmentFrame, payload: Tensor, *, sender: str, copy: HeadCopy) -> None:
        """Check the payload that a rank of replica `sender` has announced, and write its heads, `copy`, to the pool.

        Raises TransferError if another replica fills this handoff, HandoffExpired if it is closed or fenced,
        ChecksumMismatch if the payload is corrupt or an earlier segment is missing.
        """
        if checksum(payload) != frame.checksum:
            raise ChecksumMismatch(f"handoff {self.handoff} segment {frame.number}: payload corrupted in transit")
        with self._lock:
            self._ledger.admit(frame.epoch, sender=sender)
            if self._ledger.accept(frame, copy=copy):
                self._opened.hold_up()
                self._unpack(payload, frame.segment, copy.receiver_heads)
                self._written[copy.sender] = stream_event(self._pool.device)

    def _unpack(self, payload: Tensor, segment: Segment, heads: Sequence[range]) -> None:
        if self._codec.is_of_states(segment):
            assert self._state_index is not None, "the opening has no state slot"
            self._codec.unpack_states(payload, self._pool, segment, heads, self._state_index)
            return
        start = segment.first_token - self._first_token
        slots_T, window_slots_T = self._slots_T[start : start + segment.num_tokens], self._window_slots_T
        if window_slots_T is not None:
            start = segment.first_window_token - self._window_start
            window_slots_T = window_slots_T[start : start + segment.num_window_tokens]
        self._codec.unpack(payload, self._pool, segment, heads, slots_T, window_slots_T=window_slots_T)

    def commit(self, frame: CommitFrame, *, sender: str, copy: HeadCopy, num_sources: int) -> Landing | None:
        """Mark one sending rank as complete.

        Returns the Landing when all `num_sources` senders of this rank are complete. Raises as `write` does.
        """
        self._pool.synchronize()
        with self._lock:
            self._ledger.admit(frame.epoch, sender=sender)
            return self._ledger.commit(frame, copy=copy, num_sources=num_sources)

    def close(self) -> None:
        """Reject every later frame. Waits for writes in progress."""
        with self._lock:
            self._ledger.close()
            for event in self._written.values():
                event.wait()


class _IncomingLink:
    """Receives each announced payload in order, on its own thread, and acknowledges handoffs.

    Frames are validated before they are queued, and checked against their handoff's opening before a buffer is
    allocated. An invalid frame closes the link.
    """

    def __init__(self, receiver: Receiver, hello: pb.Hello, *, copy: HeadCopy, num_sources: int) -> None:
        """copy: heads that the link carries. num_sources: number of links that send to this rank.

        The caller has acquired a thread slot, which the link releases.
        """
        self._receiver = receiver
        self._config = receiver.config
        self._prefix = key_of_link(hello.sender, receiver=self._config.rank, epoch=hello.epoch, unique=uuid4().hex)
        self._sender = hello.sender.rpartition("/")[0]  # replica
        self._copy = copy
        self._num_sources = num_sources
        self._frames: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()  # None: end
        self._answers: asyncio.Queue[pb.ReceiverFrame | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._has_ended = False  # the gRPC stream has ended; later link errors are expected
        self._rejected: tuple[str, int] | None = None  # last rejected handoff, reported once instead of per segment

    async def converse(self, frames: AsyncIterator[pb.SenderFrame]) -> AsyncIterator[pb.ReceiverFrame]:
        try:
            threading.Thread(target=self._run, name=f"kv-recv-{self._prefix}", daemon=True).start()
        except RuntimeError:  # no thread is left on this machine
            self._receiver.threads.release()
            raise
        listener = asyncio.create_task(self._listen(frames))
        try:
            yield pb.ReceiverFrame(welcome=pb.Welcome(prefix=self._prefix))
            while (answer := await self._answers.get()) is not None:
                yield answer
        finally:
            listener.cancel()
            self._has_ended = True
            self._frames.put(None)
            if self._link:
                self._link.close()
            self._receiver.rendezvous.forget(self._prefix)

    async def _listen(self, frames: AsyncIterator[pb.SenderFrame]) -> None:
        try:
            async for message in frames:
                self._frames.put(self._checked(message))
        except (RequestError, LinkClosed) as error:
            logger.warning("link closed prefix=%s: %s", self._prefix, error)
        finally:
            self._answers.put_nowait(None)

    def _checked(self, message: pb.SenderFrame) -> _Frame:
        """Parse and validate an announcement. Raises RequestError, LinkClosed."""
        if self._frames.qsize() >= _MAX_ANNOUNCED:
            raise LinkClosed(f"limit of {_MAX_ANNOUNCED} announced frames without payloads reached")
        frame, pool = frame_from_proto(message), self._config.pool
        if isinstance(frame, CommitFrame):
            check_commit(frame, pool.layout, num_blocks=pool.num_blocks)
            return frame
        check_segment(frame, pool.layout, copy=self._copy, num_blocks=pool.num_blocks)
        # The size follows from the segment; a difference means that the two sides disagree on the layout.
        num_bytes = self._config.codec.num_bytes(frame.segment, self._copy.receiver_heads)
        if num_bytes != frame.num_bytes:
            raise LinkClosed(
                f"handoff {frame.handoff} segment {frame.number}: announced {frame.num_bytes} bytes, expected "
                f"{num_bytes} for {frame.segment}"
            )
        return frame

    # On the link's thread.

    def _run(self) -> None:
        store = local_store(self._receiver.rendezvous, timeout_s=MEET_TIMEOUT_S)
        try:
            with own_stream(self._config.pool.device):
                self._link = link = self._config.make_link(store, prefix=self._prefix, is_sender=False)
                if self._has_ended:  # ended before the link was stored
                    return
                link.meet()
                self._receive(link, StagingRing(link.device, num_buffers=link.num_buffers))
        except TransferError as error:
            if not self._has_ended:
                logger.warning("link failed prefix=%s: %s", self._prefix, error)
        except Exception:  # thread boundary: the link must close, so that the sender notices
            logger.exception("link failed prefix=%s", self._prefix)
        finally:
            if self._link:
                self._link.close()
            self._answer(None)
            self._receiver.threads.release()

    def _receive(self, link: Link, ring: StagingRing) -> None:
        """Process frames in the announced order. The next payload arrives while one is written."""
        begun: deque[_Announced | None] = deque()
        while True:
            if not begun:
                begun.append(self._begin(self._frames.get(), link, ring))
            self._begin_more(begun, link, ring)
            if (oldest := begun.popleft()) is None:
                return
            frame, payload = oldest
            if payload is None:
                self._take(frame, None)
                continue
            ring.wait()
            self._begin_more(begun, link, ring)
            self._take(frame, payload)
            ring.release()

    def _begin_more(self, begun: deque[_Announced | None], link: Link, ring: StagingRing) -> None:
        """Start receiving announced payloads while there are free buffers. Does not block."""
        while ring.has_room and not self._frames.empty():
            begun.append(self._begin(self._frames.get(), link, ring))

    def _begin(self, frame: _Frame | None, link: Link, ring: StagingRing) -> _Announced | None:
        """Start receiving a frame's payload, if it has one. Raises LinkClosed if it is too large to discard."""
        if frame is None:
            return None
        if isinstance(frame, CommitFrame):
            return frame, None
        end = self._receiver.end_of(frame.handoff)
        if frame.segment.end_token > end and frame.num_bytes > _MAX_UNWANTED_BYTES:
            raise LinkClosed(
                f"handoff {frame.handoff} segment {frame.number}: exceeds the opening, which ends at {end}"
            )
        payload = ring.take(frame.num_bytes)
        ring.start(link.recv(payload), timeout_s=operation_timeout(self._config.timeout_s, frame.num_bytes))
        return frame, payload

    def _take(self, frame: _Frame, payload: Tensor | None) -> None:
        """Write or commit a frame. A rejected handoff does not close the link, which others share."""
        try:
            incoming = self._receiver.find(frame.handoff)
            if isinstance(frame, CommitFrame):
                landing = incoming.commit(frame, sender=self._sender, copy=self._copy, num_sources=self._num_sources)
                self._answer(pb.ReceiverFrame(landed=pb.Landed(handoff=frame.handoff, epoch=frame.epoch)))
                if landing:
                    self._receiver.landed(landing)
            else:
                assert payload is not None
                incoming.write(frame, payload, sender=self._sender, copy=self._copy)
        except TransferError as error:
            if self._rejected != (frame.handoff, frame.epoch):
                self._rejected = (frame.handoff, frame.epoch)
                rejected = pb.Rejected(handoff=frame.handoff, epoch=frame.epoch, reason=str(error))
                self._answer(pb.ReceiverFrame(rejected=rejected))

    def _answer(self, frame: pb.ReceiverFrame | None) -> None:
        """Queue an answer. Raises LinkClosed if the sender does not read its answers."""
        if frame and self._answers.qsize() >= _MAX_ANNOUNCED:
            raise LinkClosed(f"limit of {_MAX_ANNOUNCED} unread answers reached")
        try:
            self._loop.call_soon_threadsafe(self._answers.put_nowait, frame)
        except RuntimeError:
            pass  # the event loop has ended, and the call with it
