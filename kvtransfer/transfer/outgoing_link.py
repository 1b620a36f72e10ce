"""One link to one receiving rank: its conversation, its thread, and the parts of handoffs that go through it."""

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
from core.types.wire_version import WIRE_VERSION
from core.wire.call_errors import error_of
from core.wire.channel import open_channel
from engine.kv.checksum import checksum
from kvtransfer.links.backends import make_link
from kvtransfer.links.device_stream import StreamEvent, own_stream
from kvtransfer.links.link import MEET_TIMEOUT_S, Link
from kvtransfer.protocol.frames import CommitFrame, SegmentFrame
from kvtransfer.protocol.rank_transfer import Ending, LinkTransfer, RankTransfer
from kvtransfer.protocol.segment import Segment, operation_timeout
from kvtransfer.transfer.codec import slots_of
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.reconnection import Reconnection
from kvtransfer.transfer.rendezvous import remote_store
from kvtransfer.transfer.staging import StagingRing
from kvtransfer.transfer.wire_messages import frame_to_proto

logger = logging.getLogger(__name__)


_MAX_REASON = 1000  # characters of what the other side says
_READ_S = 0.2  # for what has come and is not read yet

# What waits for the link's thread, and behind what on the device it must come.
_Job = tuple[LinkTransfer, Segment | Ending, StreamEvent]


class OutgoingLink:
    """Carries every handoff from this rank to one receiving rank, in the order in which they come.

    Fails as a whole: then every outlet on it ends with an error at once, even while its thread is still stuck in an
    operation that waits for its deadline. Its lock is held over every change of an outlet's state; `on_over` is called
    without it, from any thread, when an outlet of that passage has ended and is not being read any more.
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
        self._name = str(config.identity.name)  # which the other side compares with the certificate
        self._epoch = epoch
        self._loop = loop
        self._reconnection = reconnection
        self._on_over = on_over
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._frames: asyncio.Queue[pb.SenderFrame] = asyncio.Queue()
        self._lock = threading.Lock()
        self._link_transfers: dict[HandoffKey, LinkTransfer] = {}
        self._last_place: tuple[tuple[int, ...], int, int] = ((), 0, 0)
        self._last_slots_T = torch.empty(0, dtype=torch.int64, device=config.pool.device)
        self._failure: TransferError | None = None
        self._link: Link | None = None
        self._conversation: asyncio.Task[None] | None = None  # belongs to the loop
        loop.call_soon_threadsafe(self._start)

    @property
    def is_closed(self) -> bool:
        return self._failure is not None

    def add(self, link_transfer: LinkTransfer) -> None:
        with self._lock:
            self._link_transfers[link_transfer.key] = link_transfer
        if self._failure:
            self.abort(link_transfer, self._failure)

    def put(self, link_transfer: LinkTransfer, item: Segment | Ending) -> None:
        self._jobs.put((link_transfer, item, StreamEvent(self._config.pool.device)))

    def abort(self, link_transfer: LinkTransfer, error: TransferError) -> None:
        """Fail this outlet; the others go on. From any thread."""
        with self._lock:
            link_transfer.fail(error)
        self._changed(link_transfer)

    def fail(self, error: TransferError) -> None:
        """Close the link and end everything on it. From any thread; the first error counts."""
        with self._lock:
            if self._failure:
                return
            self._failure = error
            link_transfers = list(self._link_transfers.values())
        if not isinstance(error, LinkClosed) or link_transfers:
            logger.warning(
                "link to %s failed epoch=%d handoffs=%d: %s", self._address, self._epoch, len(link_transfers), error
            )
        if self._link:
            self._link.close()
        self._reconnection.failed()
        self._jobs.put(None)
        with suppress(RuntimeError):  # the loop has ended, and with it the conversation
            self._loop.call_soon_threadsafe(self._stop)
        for link_transfer in link_transfers:
            self.abort(link_transfer, error)

    def _changed(self, link_transfer: LinkTransfer) -> None:
        """After a change of state, which may have been its last."""
        if link_transfer.is_ended:
            with self._lock:
                self._link_transfers.pop(link_transfer.key, None)
        if link_transfer.is_over:
            self._on_over(link_transfer.transfer)

    # On the event loop: the conversation.

    async def disconnected(self) -> None:
        """After a failure, wait until the conversation has ended and its channel is closed."""
        self._stop()
        if self._conversation:
            await asyncio.wait([self._conversation], timeout=self._config.timeout_s)

    def _start(self) -> None:
        if not self._failure:
            self._conversation = self._loop.create_task(self._converse())

    def _stop(self) -> None:
        if self._conversation:
            self._conversation.cancel()

    async def _converse(self) -> None:
        try:
            await asyncio.sleep(self._reconnection.delay_s)
            async with open_channel(self._address, peer=self._peer, identity=self._config.identity) as channel:
                stub = rpc.RankStub(channel)
                call = stub.Connect(self._outgoing_frames())
                async with asyncio.timeout(self._config.timeout_s):
                    frame = await anext(aiter(call))
                if frame.WhichOneof("frame") != "welcome":
                    raise LayoutMismatch(f"{self._address} refuses {self._name}: {frame.rejected.reason[:_MAX_REASON]}")
                check_name(frame.welcome.prefix, "welcome.prefix")
                self._reconnection.succeeded()
                threading.Thread(target=self._run, args=(stub, frame.welcome), name="kv-send", daemon=True).start()
                async for frame in call:
                    self._answered(frame)
            raise LinkClosed(f"{self._address} closed the link")
        except aio.AioRpcError as error:
            self.fail(LinkClosed(f"{self._address} is gone: {error_of(error, peer=self._address)}"))
        except TimeoutError:
            self.fail(LinkClosed(f"{self._address} did not answer within {self._config.timeout_s} s"))
        except StopAsyncIteration:
            self.fail(LinkClosed(f"{self._address} hung up"))
        except RequestError as error:
            self.fail(LinkClosed(f"{self._address} answers what cannot be meant: {error}"))
        except TransferError as error:
            self.fail(error)
        except Exception as error:  # an edge: a link that nobody serves must not be handed out
            logger.exception("link to %s: its conversation ended", self._address)
            self.fail(LinkClosed(f"link to {self._address}: {error!r}"))

    async def _outgoing_frames(self) -> AsyncIterator[pb.SenderFrame]:
        layout = self._config.pool.layout
        yield pb.SenderFrame(
            hello=pb.Hello(
                wire_version=WIRE_VERSION,
                layout=layout.fingerprint,
                sender=self._name,
                epoch=self._epoch,
                backend=self._config.mode,
                wire_dtype=self._config.wire_dtype,
                sender_rank=self._config.rank,
                sender_ranks=layout.tensor_parallel,
            )
        )
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
        """Not at once: where this process stood still until now, the answer has come and was not read."""
        self._loop.call_later(_READ_S, self._fail_unless_answered, link_transfer)

    def _fail_unless_answered(self, link_transfer: LinkTransfer) -> None:
        if not link_transfer.is_ended:
            self.fail(LinkClosed(f"{self._address} did not acknowledge handoff {link_transfer.transfer.handoff.id}"))

    # On the link's thread: the bytes.

    def _run(self, stub: rpc.RankStub, welcome: pb.Welcome) -> None:
        store = remote_store(stub, self._loop, timeout_s=MEET_TIMEOUT_S)
        try:
            with own_stream(self._config.pool.device):
                end = self._config.link_end(store, prefix=welcome.prefix, is_sender=True)
                self._link = link = make_link(self._config.backend, end)
                if self._failure:  # before it was there to be closed
                    return
                link.meet()
                self._carry(link)
        except TransferError as error:
            self.fail(error)
        except Exception as error:  # the edge of this thread: whoever waits for these handoffs must hear of it
            logger.exception("link to %s: its thread ended", self._address)
            self.fail(LinkClosed(f"link to {self._address}: {error!r}"))
        finally:
            if self._link:
                self._link.close()

    def _carry(self, link: Link) -> None:
        ring = StagingRing(link.device, num_buffers=link.num_buffers)
        link_transfer: LinkTransfer | None = None
        while (job := self._next_job(ring, link_transfer)) is not None:
            link_transfer, item, computed = job
            if isinstance(item, Ending):
                self._commit(link_transfer, item)
            else:
                begin = time.monotonic()
                computed.hold_up()
                self._send(link, ring, link_transfer, item)
                link_transfer.link_s += time.monotonic() - begin
                link_transfer.num_sent += 1

    def _next_job(self, ring: StagingRing, last: LinkTransfer | None) -> _Job | None:
        """Wait for it; but first, where none is there, for what is on the wire: an error there must be heard of, and
        the time counts as that of the outlet that was served last."""
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            begin = time.monotonic()
            ring.drain()
            if last:
                last.link_s += time.monotonic() - begin
            return self._jobs.get()

    def _send(self, link: Link, ring: StagingRing, link_transfer: LinkTransfer, segment: Segment) -> None:
        """Pack one segment and put it on the wire, where the one before may still be."""
        if link_transfer.is_ended:
            return
        ring.make_room()
        payload = ring.take(self._config.codec.num_bytes(segment))
        found = self._pack(link_transfer, segment, payload)
        if found is None or link_transfer.is_ended:
            ring.put_back()
            return
        self._announce(link_transfer, link_transfer.announce(segment, num_bytes=payload.numel(), checksum=found))
        self._config.failpoint(FailpointStage.SENDING, link_transfer.transfer.handoff.id)
        ring.start(link.send(payload), timeout_s=operation_timeout(self._config.timeout_s, payload.numel()))
        link_transfer.wire_bytes += payload.numel()

    def _pack(self, link_transfer: LinkTransfer, segment: Segment, payload: Tensor) -> int | None:
        """Fill the payload; its checksum, or None if the outlet has ended."""
        with self._lock:
            if not link_transfer.start_reading():
                return None
        try:
            self._config.codec.pack(self._config.pool, segment, self._slots(link_transfer, segment), payload)
            return checksum(payload)  # its value on the host: from here on the pool is not read any more
        finally:
            with self._lock:
                link_transfer.stop_reading()
            self._changed(link_transfer)

    def _slots(self, link_transfer: LinkTransfer, segment: Segment) -> Tensor:
        """Where a segment's positions lie in the pool: mostly where those of the last one did, of other layers."""
        place = (link_transfer.transfer.blocks, segment.first_token, segment.num_tokens)
        if place != self._last_place:
            self._last_place, self._last_slots_T = place, slots_of(self._config.pool, *place)
        return self._last_slots_T

    def _commit(self, link_transfer: LinkTransfer, ending: Ending) -> None:
        with self._lock:
            if link_transfer.is_ended:
                return
            frame = link_transfer.announce_commit(ending)
        self._config.failpoint(FailpointStage.COMMITTING, frame.handoff)
        self._announce(link_transfer, frame)
        within_s = operation_timeout(
            self._config.timeout_s, link_transfer.wire_bytes
        )  # much of it may be on its way still
        self._loop.call_soon_threadsafe(self._loop.call_later, within_s, self._check_answered, link_transfer)

    def _announce(self, link_transfer: LinkTransfer, frame: SegmentFrame | CommitFrame) -> None:
        message = frame_to_proto(frame)
        link_transfer.wire_bytes += message.ByteSize()
        self._loop.call_soon_threadsafe(self._frames.put_nowait, message)
