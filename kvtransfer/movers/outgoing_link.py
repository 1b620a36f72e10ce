"""One link to one receiving rank: its conversation, its thread, and the parts of handoffs that go through it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from grpc import aio
from torch import Tensor

from cluster.rpc import transfer_pb2 as pb
from cluster.rpc import transfer_pb2_grpc as rpc
from cluster.wire.channel import error_of, open_channel
from cluster.words.errors import HandoffExpired, LayoutMismatch, LinkClosed, TransferError
from engine.kv.checksum import checksum
from kvtransfer.links.backends import open_link
from kvtransfer.links.link import MEET_TIMEOUT_S, Link, LinkEnd, operation_timeout
from kvtransfer.movers.codec import WIRE_VERSION, slots_of
from kvtransfer.movers.lane import Mark, own_lane
from kvtransfer.movers.meeting import remote_store
from kvtransfer.movers.staging import StagingRing
from kvtransfer.protocol.passage import Ending, Outlet
from kvtransfer.protocol.segment import Segment

if TYPE_CHECKING:
    from kvtransfer.movers.sender import Sender

logger = logging.getLogger(__name__)


# What waits for the link's thread, and behind what on the device it must come.
_Job = tuple[Outlet, Segment | Ending, Mark]


class OutgoingLink:
    """Carries every handoff from this rank to one receiving rank, in the order in which they come.

    Fails as a whole: then every outlet on it ends with an error at once, even while its thread is still stuck in an
    operation that waits for its deadline.
    """

    def __init__(self, sender: Sender, address: str, *, epoch: int, delay_s: float) -> None:
        self._sender = sender
        self._address = address
        self._epoch = epoch
        self._delay_s = delay_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._frames: asyncio.Queue[pb.SenderFrame] = asyncio.Queue()
        self._lock = threading.Lock()
        self._outlets: dict[tuple[str, int], Outlet] = {}
        self._last_place: tuple[tuple[int, ...], int, int] = ((), 0, 0)
        self._last_slots_T = torch.empty(0, dtype=torch.int64, device=sender.pool.device)
        self._failure: TransferError | None = None
        self._link: Link | None = None
        self._conversation: asyncio.Task[None] | None = None  # belongs to the loop
        sender.loop.call_soon_threadsafe(self._start)

    @property
    def is_closed(self) -> bool:
        return self._failure is not None

    def add(self, outlet: Outlet) -> None:
        with self._lock:
            self._outlets[outlet.key] = outlet
        if self._failure:
            outlet.fail(self._failure)

    def put(self, outlet: Outlet, item: Segment | Ending) -> None:
        self._jobs.put((outlet, item, Mark(self._sender.pool.device)))

    def forget(self, outlet: Outlet) -> None:
        with self._lock:
            self._outlets.pop(outlet.key, None)

    def fail(self, error: TransferError) -> None:
        """Close the link and end everything on it. From any thread; the first error counts."""
        with self._lock:
            if self._failure:
                return
            self._failure = error
            outlets = list(self._outlets.values())
        if not isinstance(error, LinkClosed) or outlets:
            logger.warning(
                "link to %s failed epoch=%d handoffs=%d: %s", self._address, self._epoch, len(outlets), error
            )
        if self._link:
            self._link.close()
        self._sender.link_failed(self._address)
        self._jobs.put(None)
        with suppress(RuntimeError):  # the loop has ended, and with it the conversation
            self._sender.loop.call_soon_threadsafe(self._stop)
        for outlet in outlets:
            outlet.fail(error)

    # On the event loop: the conversation.

    async def disconnected(self) -> None:
        """After a failure, wait until the conversation has ended and its channel is closed."""
        self._stop()
        if self._conversation:
            await asyncio.wait([self._conversation], timeout=self._sender.timeout_s)

    def _start(self) -> None:
        if not self._failure:
            self._conversation = self._sender.loop.create_task(self._converse())

    def _stop(self) -> None:
        if self._conversation:
            self._conversation.cancel()

    async def _converse(self) -> None:
        try:
            await asyncio.sleep(self._delay_s)
            async with open_channel(self._address) as channel:
                stub = rpc.RankStub(channel)
                call = stub.Connect(self._outgoing_frames())
                frame = await asyncio.wait_for(anext(aiter(call)), self._sender.timeout_s)
                if frame.WhichOneof("frame") == "refused":
                    raise LayoutMismatch(f"{self._address} refuses {self._sender.name}: {frame.refused.reason}")
                self._sender.link_welcome(self._address)
                threading.Thread(target=self._run, args=(stub, frame.welcome), name="kv-send", daemon=True).start()
                async for frame in call:
                    self._answered(frame)
            raise LinkClosed(f"{self._address} closed the link")
        except aio.AioRpcError as error:
            self.fail(LinkClosed(f"{self._address} is gone: {error_of(error, peer=self._address)}"))
        except TimeoutError:
            self.fail(LinkClosed(f"{self._address} did not answer within {self._sender.timeout_s} s"))
        except StopAsyncIteration:
            self.fail(LinkClosed(f"{self._address} hung up"))
        except TransferError as error:
            self.fail(error)

    async def _outgoing_frames(self) -> AsyncIterator[pb.SenderFrame]:
        layout = self._sender.pool.layout
        yield pb.SenderFrame(
            hello=pb.Hello(
                wire_version=WIRE_VERSION,
                layout=layout.fingerprint,
                sender=self._sender.name,
                epoch=self._epoch,
                backend=self._sender.backend,
                wire_dtype=self._sender.wire_dtype,
                sender_rank=self._sender.rank,
                sender_ranks=layout.tensor_parallel,
            )
        )
        while True:
            yield await self._frames.get()

    def _answered(self, frame: pb.ReceiverFrame) -> None:
        kind = frame.WhichOneof("frame")
        answer = frame.landed if kind == "landed" else frame.refused
        outlet = self._outlets.get((answer.handoff, answer.epoch))
        if outlet and kind == "landed":
            outlet.landed()
        elif outlet:
            outlet.fail(HandoffExpired(f"{self._address}: {frame.refused.reason}"))

    # On the link's thread: the bytes.

    def _run(self, stub: rpc.RankStub, welcome: pb.Welcome) -> None:
        try:
            with own_lane(self._sender.pool.device):
                self._link = open_link(self._sender.backend, self._link_end(stub, welcome))
                self._carry(self._link)
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
        outlet: Outlet | None = None
        while (job := self._next_job(ring, outlet)) is not None:
            outlet, item, computed = job
            if isinstance(item, Ending):
                self._commit(outlet, item)
            else:
                begin = time.monotonic()
                computed.hold_up()
                self._send(link, ring, outlet, item)
                outlet.link_s += time.monotonic() - begin
                outlet.num_sent += 1

    def _next_job(self, ring: StagingRing, last: Outlet | None) -> _Job | None:
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

    def _send(self, link: Link, ring: StagingRing, outlet: Outlet, segment: Segment) -> None:
        """Pack one segment and put it on the wire, where the one before may still be."""
        if outlet.is_ended:
            return
        ring.make_room()
        payload = ring.take(self._sender.codec.num_bytes(segment))
        found = self._pack(outlet, segment, payload)
        if found is None or outlet.is_ended:
            ring.put_back()
            return
        announced = outlet.announce(segment, num_bytes=payload.numel(), checksum=found)
        self._announce(outlet, pb.SenderFrame(segment=announced))
        timeout_s = operation_timeout(self._sender.timeout_s, payload.numel())
        ring.start(link.send(payload), timeout_s=timeout_s)
        outlet.wire_bytes += payload.numel()

    def _pack(self, outlet: Outlet, segment: Segment, payload: Tensor) -> int | None:
        """Fill the payload; its checksum, or None if the outlet has ended."""
        if not outlet.start_reading():
            return None
        try:
            self._sender.codec.pack(self._sender.pool, segment, self._slots(outlet, segment), payload)
            return checksum(payload)  # its value on the host: from here on the pool is not read any more
        finally:
            outlet.stop_reading()

    def _slots(self, outlet: Outlet, segment: Segment) -> Tensor:
        """Where a segment's positions lie in the pool: mostly where those of the last one did, of other layers."""
        place = (outlet.passage.blocks, segment.first_token, segment.num_tokens)
        if place != self._last_place:
            self._last_place, self._last_slots_T = place, slots_of(self._sender.pool, *place)
        return self._last_slots_T

    def _commit(self, outlet: Outlet, ending: Ending) -> None:
        if not outlet.is_ended:
            self._announce(outlet, pb.SenderFrame(commit=outlet.announce_commit(ending)))
            self._sender.loop.call_soon_threadsafe(self._expect_answer, outlet)

    def _expect_answer(self, outlet: Outlet) -> None:
        def give_up() -> None:
            if not outlet.is_ended:
                self.fail(LinkClosed(f"{self._address} did not acknowledge handoff {outlet.passage.handoff.id}"))

        self._sender.loop.call_later(self._sender.timeout_s, give_up)

    def _announce(self, outlet: Outlet, frame: pb.SenderFrame) -> None:
        outlet.wire_bytes += frame.ByteSize()
        self._sender.loop.call_soon_threadsafe(self._frames.put_nowait, frame)

    def _link_end(self, stub: rpc.RankStub, welcome: pb.Welcome) -> LinkEnd:
        return LinkEnd(
            store=remote_store(stub, self._sender.loop, timeout_s=MEET_TIMEOUT_S),
            prefix=welcome.prefix,
            is_sender=True,
            host=self._sender.host,
            device=self._sender.pool.device,
            timeout_s=MEET_TIMEOUT_S,
        )
