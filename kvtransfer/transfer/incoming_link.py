"""Incoming link from one sending rank: its gRPC stream and its receiving thread."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from torch import Tensor

from core.rpc import transfer_pb2 as pb
from core.types.errors import LinkClosed, RequestError, TransferError
from kvtransfer.links.backends import make_link
from kvtransfer.links.link import MEET_TIMEOUT_S, Link, own_stream
from kvtransfer.protocol.frames import CommitFrame, SegmentFrame
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.plan import HeadCopy
from kvtransfer.protocol.segment import operation_timeout
from kvtransfer.protocol.validation import check_commit, check_segment
from kvtransfer.transfer.incoming import Incoming
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.rendezvous import Rendezvous, local_store
from kvtransfer.transfer.staging import StagingRing
from kvtransfer.transfer.wire_messages import frame_from_proto

logger = logging.getLogger(__name__)

_MAX_ANNOUNCED = 4096  # queued frames per direction: a sender announces only what it is about to send
_MAX_UNWANTED_BYTES = 64 << 20  # a rejected payload must still be received to be discarded

_Frame = SegmentFrame | CommitFrame
_Announced = tuple[_Frame, Tensor | None]  # a frame, and a segment's payload buffer


class Handoffs(Protocol):
    """Registry of the handoffs open on this rank (the Receiver). Called from the link's thread."""

    def find(self, handoff: str) -> Incoming:
        """Return an open handoff. Raises HandoffExpired."""
        ...

    def end_of(self, handoff: str) -> int:
        """Return the end position of a handoff that is or was open; 0 if it is unknown."""
        ...

    def landed(self, landing: Landing) -> None: ...


class IncomingLink:
    """Receives each announced payload in order, on its own thread, and acknowledges handoffs.

    Frames are validated before they are queued, and checked against their handoff's opening before a buffer is
    allocated. An invalid frame closes the link.
    """

    def __init__(
        self,
        handoffs: Handoffs,
        config: LinkConfig,
        rendezvous: Rendezvous,
        *,
        prefix: str,
        sender: str,
        copy: HeadCopy,
        num_sources: int,
        ended: Callable[[], None],
    ) -> None:
        """Create a link without starting it.

        sender: replica id. copy: heads that the link carries. num_sources: number of links that send to this rank.
        ended: callback on the link's thread, called last.
        """
        self.has_begun = False  # whether its thread was started
        self._handoffs = handoffs
        self._config = config
        self._rendezvous = rendezvous
        self._prefix = prefix
        self._sender = sender
        self._copy = copy
        self._num_sources = num_sources
        self._ended = ended
        self._frames: queue.SimpleQueue[_Frame | None] = queue.SimpleQueue()  # None: end
        self._answers: asyncio.Queue[pb.ReceiverFrame | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._has_ended = False  # the gRPC stream has ended; later link errors are expected
        self._rejected: tuple[str, int] | None = None  # last rejected handoff, reported once instead of per segment

    async def converse(self, frames: AsyncIterator[pb.SenderFrame]) -> AsyncIterator[pb.ReceiverFrame]:
        threading.Thread(target=self._run, name=f"kv-recv-{self._prefix}", daemon=True).start()
        self.has_begun = True
        listener = asyncio.create_task(self._listen(frames))
        try:
            while (answer := await self._answers.get()) is not None:
                yield answer
        finally:
            listener.cancel()
            self._has_ended = True
            self._frames.put(None)
            if self._link:
                self._link.close()
            self._rendezvous.forget(self._prefix)

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
        store = local_store(self._rendezvous, timeout_s=MEET_TIMEOUT_S)
        try:
            with own_stream(self._config.pool.device):
                end = self._config.link_end(store, prefix=self._prefix, is_sender=False)
                self._link = link = make_link(self._config.backend, end)
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
            self._ended()

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
        end = self._handoffs.end_of(frame.handoff)
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
            incoming = self._handoffs.find(frame.handoff)
            if isinstance(frame, CommitFrame):
                self._commit(incoming, frame)
            else:
                assert payload is not None
                incoming.write(frame, payload, sender=self._sender, copy=self._copy)
        except TransferError as error:
            if self._rejected != (frame.handoff, frame.epoch):
                self._rejected = (frame.handoff, frame.epoch)
                rejected = pb.Rejected(handoff=frame.handoff, epoch=frame.epoch, reason=str(error))
                self._answer(pb.ReceiverFrame(rejected=rejected))

    def _commit(self, incoming: Incoming, frame: CommitFrame) -> None:
        landing = incoming.commit(frame, sender=self._sender, copy=self._copy, num_sources=self._num_sources)
        self._answer(pb.ReceiverFrame(landed=pb.Landed(handoff=frame.handoff, epoch=frame.epoch)))
        if landing:
            self._handoffs.landed(landing)

    def _answer(self, frame: pb.ReceiverFrame | None) -> None:
        """Queue an answer. Raises LinkClosed if the sender does not read its answers."""
        if frame and self._answers.qsize() >= _MAX_ANNOUNCED:
            raise LinkClosed(f"limit of {_MAX_ANNOUNCED} unread answers reached")
        try:
            self._loop.call_soon_threadsafe(self._answers.put_nowait, frame)
        except RuntimeError:
            pass  # the event loop has ended, and the call with it
