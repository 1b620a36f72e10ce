"""Outgoing link to one receiving rank: its gRPC stream, its thread, and the link transfers on it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import torch
from grpc import aio
from torch import Tensor

from core.identity.process_name import ProcessName
from core.rpc import transfer_pb2 as pb
from core.rpc import transfer_pb2_grpc as rpc
from core.types.errors import HandoffExpired, LayoutMismatch, LinkClosed, RequestError, TransferError
from core.types.failpoint import FailpointStage
from core.types.handoff import HandoffKey
from core.types.validation import check_name
from core.wire.call_errors import error_of
from core.wire.channel import open_channel
from engine.kv.checksum import checksum
from engine.runner.streams import Event
from kvtransfer.links.link import MEET_TIMEOUT_S, Link, StagingRing, own_stream, stream_event
from kvtransfer.protocol.frames import CommitFrame, Segment, SegmentFrame, operation_timeout
from kvtransfer.protocol.rank_transfer import LinkTransfer, RankTransfer
from kvtransfer.transfer.codec import slots_of, window_slots_of
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.rendezvous import remote_store
from kvtransfer.transfer.wire_messages import frame_to_proto

logger = logging.getLogger(__name__)


_MAX_REASON = 1000  # characters of the peer's error message
_READ_S = 0.2  # grace period to read an answer that has arrived
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 1.0  # before a reconnection

# Work item for the link's thread, and the device event that it must wait for.
_Job = tuple[LinkTransfer, Segment | CommitFrame, Event]


class OutgoingLink:
    """Carries every handoff from this rank to one receiving rank, in order.

    Fails as a whole: every link transfer on it then fails at once, even while the link's thread is stuck in an
    operation until its deadline. The lock is held over every state change of a link transfer. `on_over` is called
    without it, from any thread, when a link transfer has ended and its blocks are not being read.
    """

    def __init__(
        self,
        config: LinkConfig,
        address: str,
        *,
        peer: ProcessName,
        epoch: int,
        loop: asyncio.AbstractEventLoop,
        reconnection: Reconnection,
        on_over: Callable[[RankTransfer], None],
    ) -> None:
        self._config = config
        self._address = address
        self._peer = peer
        self._epoch = epoch
        self._loop = loop
        self._reconnection = reconnection
        self._on_over = on_over
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._frames: asyncio.Queue[pb.SenderFrame] = asyncio.Queue()
        self._lock = threading.Lock()
        self._link_transfers: dict[HandoffKey, LinkTransfer] = {}
        # Handoff, block table, and range of positions of the last segment.
        self._last_place: tuple[HandoffKey, tuple[int, ...], int, int] = (("", 0), (), 0, 0)
        self._last_slots: tuple[Tensor, Tensor | None] = torch.empty(0, dtype=torch.int64), None
        self._failure: TransferError | None = None
        self._link: Link | None = None
        self._stream: asyncio.Task[None] | None = None  # used on the event loop only
        loop.call_soon_threadsafe(self._start)

    @property
    def is_closed(self) -> bool:
        return self._failure is not None

    def add(self, link_transfer: LinkTransfer) -> None:
        with self._lock:
            self._link_transfers[link_transfer.key] = link_transfer
        if self._failure:
            self.abort(link_transfer, self._failure)

    def put(self, link_transfer: LinkTransfer, item: Segment | CommitFrame) -> None:
        self._jobs.put((link_transfer, item, stream_event(self._config.pool.device)))

    def abort(self, link_transfer: LinkTransfer, error: TransferError) -> None:
        """Fail this link transfer only. Thread-safe."""
        with self._lock:
            link_transfer.fail(error)
        self._changed(link_transfer)

    def fail(self, error: TransferError) -> None:
        """Close the link and fail every link transfer on it. Thread-safe; the first error wins."""
        with self._lock:
            if self._failure:
                return
            self._failure = error
            link_transfers = list(self._link_transfers.values())
        if not isinstance(error, LinkClosed) or link_transfers:
            failed = self._address, self._epoch, len(link_transfers), error
            logger.warning("link failed address=%s epoch=%d handoffs=%d: %s", *failed)
        if self._link:
            self._link.close()
        self._reconnection.failed()
        self._jobs.put(None)
        with suppress(RuntimeError):  # the event loop has ended, and the stream with it
            self._loop.call_soon_threadsafe(self._stop)
        for link_transfer in link_transfers:
            self.abort(link_transfer, error)

    def _changed(self, link_transfer: LinkTransfer) -> None:
        """Handle a state change: forget the link transfer once it has ended, report it once it is over."""
        if link_transfer.is_ended:
            with self._lock:
                self._link_transfers.pop(link_transfer.key, None)
        if link_transfer.is_over:
            self._on_over(link_transfer.transfer)

    # On the event loop: the gRPC stream.

    async def disconnected(self) -> None:
        """Wait, after a failure, until the stream has ended and its channel is closed."""
        self._stop()
        if self._stream:
            await asyncio.wait([self._stream], timeout=self._config.timeout_s)

    def _start(self) -> None:
        if not self._failure:
            self._stream = self._loop.create_task(self._run_stream())

    def _stop(self) -> None:
        if self._stream:
            self._stream.cancel()

    async def _run_stream(self) -> None:
        try:
            await asyncio.sleep(self._reconnection.delay_s)
            async with open_channel(self._address, peer=self._peer, identity=self._config.identity) as channel:
                stub = rpc.RankStub(channel)
                call = stub.Connect(self._outgoing_frames())
                async with asyncio.timeout(self._config.timeout_s):
                    frame = await anext(aiter(call))
                if frame.WhichOneof("frame") != "welcome":
                    reason = frame.rejected.reason[:_MAX_REASON]
                    raise LayoutMismatch(
                        f"{self._address} rejected the link from {self._config.identity.name}: {reason}"
                    )
                check_name(frame.welcome.prefix, "welcome.prefix")
                self._reconnection.succeeded()
                threading.Thread(target=self._run, args=(stub, frame.welcome), name="kv-send", daemon=True).start()
                async for frame in call:
                    self._answered(frame)
            raise LinkClosed(f"peer {self._address} closed the link")
        except aio.AioRpcError as error:
            self.fail(LinkClosed(f"lost connection to {self._address}: {error_of(error, peer=self._address)}"))
        except TimeoutError:
            self.fail(LinkClosed(f"{self._address} did not respond within {self._config.timeout_s} s"))
        except StopAsyncIteration:
            self.fail(LinkClosed(f"{self._address} closed the stream without a welcome"))
        except RequestError as error:
            self.fail(LinkClosed(f"invalid answer from {self._address}: {error}"))
        except TransferError as error:
            self.fail(error)
        except Exception as error:  # task boundary: a link without a stream must not be reused
            logger.exception("link stream failed address=%s", self._address)
            self.fail(LinkClosed(f"link to {self._address}: {error!r}"))

    async def _outgoing_frames(self) -> AsyncIterator[pb.SenderFrame]:
        yield pb.SenderFrame(hello=self._config.hello(self._epoch))
        while True:
            yield await self._frames.get()

    def _answered(self, frame: pb.ReceiverFrame) -> None:
        has_landed = frame.WhichOneof("frame") == "landed"
        answer = frame.landed if has_landed else frame.rejected
        link_transfer = self._link_transfers.get((answer.handoff, answer.epoch))
        if link_transfer is None:
            return
        if not has_landed:
            self.abort(link_transfer, HandoffExpired(f"{self._address}: {frame.rejected.reason[:_MAX_REASON]}"))
            return
        with self._lock:
            link_transfer.landed()
        self._changed(link_transfer)

    def _check_answered(self, link_transfer: LinkTransfer) -> None:
        """Fail the link after a grace period: if this process was suspended, the answer may have arrived unread."""
        self._loop.call_later(_READ_S, self._fail_unless_answered, link_transfer)

    def _fail_unless_answered(self, link_transfer: LinkTransfer) -> None:
        if not link_transfer.is_ended:
            self.fail(LinkClosed(f"{self._address} did not acknowledge handoff {link_transfer.transfer.handoff.id}"))

    # On the link's thread: the bytes.

    def _run(self, stub: rpc.RankStub, welcome: pb.Welcome) -> None:
        store = remote_store(stub, self._loop, timeout_s=MEET_TIMEOUT_S)
        try:
            with own_stream(self._config.pool.device):
                self._link = link = self._config.make_link(store, prefix=welcome.prefix, is_sender=True)
                if self._failure:  # failed before the link was stored
                    return
                link.meet()
                self._carry(link)
        except TransferError as error:
            self.fail(error)
        except Exception as error:  # thread boundary: its handoffs must fail
            logger.exception("link thread failed address=%s", self._address)
            self.fail(LinkClosed(f"link to {self._address}: {error!r}"))
        finally:
            if self._link:
                self._link.close()

    def _carry(self, link: Link) -> None:
        ring = StagingRing(link.device, num_buffers=link.num_buffers)
        link_transfer: LinkTransfer | None = None
        while (job := self._next_job(ring, link_transfer)) is not None:
            link_transfer, item, computed = job
            if isinstance(item, CommitFrame):
                self._commit(link_transfer, item)
            else:
                begin = time.monotonic()
                computed.hold_up()
                self._send(link, ring, link_transfer, item)
                link_transfer.link_s += time.monotonic() - begin
                link_transfer.num_sent += 1

    def _next_job(self, ring: StagingRing, last: LinkTransfer | None) -> _Job | None:
        """Return the next job, or None to stop. Blocks.

        If the queue is empty, first drain the payloads on the wire to detect errors; that time counts towards `last`.
        """
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            begin = time.monotonic()
            ring.drain()
            if last:
                last.link_s += time.monotonic() - begin
            return self._jobs.get()

    def _send(self, link: Link, ring: StagingRing, link_transfer: LinkTransfer, segment: Segment) -> None:
        """Pack one segment and start sending it. The previous one may still be in flight."""
        if link_transfer.is_ended:
            return
        ring.make_room()
        payload = ring.take(self._config.codec.num_bytes(segment, link_transfer.copy.sender_heads))
        payload_checksum = self._pack(link_transfer, segment, payload)
        if payload_checksum is None or link_transfer.is_ended:
            ring.put_back()
            return
        frame = link_transfer.announce(segment, num_bytes=payload.numel(), checksum=payload_checksum)
        self._announce(link_transfer, frame)
        self._config.failpoint(FailpointStage.SENDING, link_transfer.transfer.handoff.id)
        ring.start(link.send(payload), timeout_s=operation_timeout(self._config.timeout_s, payload.numel()))
        link_transfer.wire_bytes += payload.numel()

    def _pack(self, link_transfer: LinkTransfer, segment: Segment, payload: Tensor) -> int | None:
        """Fill the payload. Returns its checksum, or None if the link transfer has ended."""
        with self._lock:
            if not link_transfer.start_reading():
                return None
        try:
            heads, codec, pool = link_transfer.copy.sender_heads, self._config.codec, self._config.pool
            if codec.is_of_states(segment):
                codec.pack_states(pool, segment, heads, pool.state_index(link_transfer.transfer.state_slot), payload)
            else:
                slots_T, window_slots_T = self._slots(link_transfer, segment)
                codec.pack(pool, segment, heads, slots_T, payload, window_slots_T=window_slots_T)
            return checksum(payload)  # synchronizes with the device, so the pool is no longer read
        finally:
            with self._lock:
                link_transfer.stop_reading()
            self._changed(link_transfer)

    def _slots(self, link_transfer: LinkTransfer, segment: Segment) -> tuple[Tensor, Tensor | None]:
        """Return the pool slots of a segment, and those in layers with a window.

        Cached, because consecutive segments differ mostly in layers only. Each transfer computes its own, because the
        parts of its blocks may differ from those of an earlier transfer.
        """
        blocks, pool = link_transfer.transfer.blocks, self._config.pool
        place = (link_transfer.key, blocks, segment.first_token, segment.num_tokens)
        if place != self._last_place:
            window_span = segment.first_window_token, segment.num_window_tokens
            window_slots_T = window_slots_of(pool, blocks, *window_span) if segment.num_window_tokens else None
            self._last_place = place
            self._last_slots = slots_of(pool, blocks, segment.first_token, segment.num_tokens), window_slots_T
        return self._last_slots

    def _commit(self, link_transfer: LinkTransfer, commit: CommitFrame) -> None:
        with self._lock:
            if link_transfer.is_ended:
                return
            frame = link_transfer.announce_commit(commit)
        self._config.failpoint(FailpointStage.COMMITTING, frame.handoff)
        self._announce(link_transfer, frame)
        # Most of the bytes may still be in flight.
        within_s = operation_timeout(self._config.timeout_s, link_transfer.wire_bytes)
        self._loop.call_soon_threadsafe(self._loop.call_later, within_s, self._check_answered, link_transfer)

    def _announce(self, link_transfer: LinkTransfer, frame: SegmentFrame | CommitFrame) -> None:
        message = frame_to_proto(frame)
        link_transfer.wire_bytes += message.ByteSize()
        self._loop.call_soon_threadsafe(self._frames.put_nowait, message)


class Reconnection:
    """Exponential backoff before a new link connects to an address. Thread-safe: one link at a time changes it."""

    def __init__(self) -> None:
        self._num_failures = 0  # in a row

    @property
    def delay_s(self) -> float:
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (self._num_failures - 1)) if self._num_failures else 0.0

    def succeeded(self) -> None:
        """Reset the delay after the peer has accepted the link."""
        self._num_failures = 0

    def failed(self) -> None:
        """Increase the delay after a link has ended, accepted or not."""
        self._num_failures += 1
