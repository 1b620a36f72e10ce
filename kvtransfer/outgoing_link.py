"""One link to one receiving rank: its conversation, its thread, and the parts of handoffs that go through it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from grpc import aio

from cluster.channel import error_of, open_channel
from cluster.errors import HandoffExpired, LayoutMismatch, LinkClosed, TransferError
from cluster.rpc import transfer_pb2 as pb
from cluster.rpc import transfer_pb2_grpc as rpc
from kvtransfer.codec import WIRE_VERSION, Segment, checksum, combine_checksums
from kvtransfer.link import MEET_TIMEOUT_S, Link, LinkEnd, backend_for, open_link, operation_timeout
from kvtransfer.meeting import remote_store
from kvtransfer.plan import HeadCopy

if TYPE_CHECKING:
    from kvtransfer.sender import Passage, Sender

logger = logging.getLogger(__name__)


class Outlet:
    """One handoff's part that goes through one link."""

    def __init__(self, link: OutgoingLink, copy: HeadCopy, passage: Passage) -> None:
        self.link = link
        self.copy = copy
        self.passage = passage
        self.wire_bytes = 0
        self.error: TransferError | None = None
        self.is_ended = False
        self.checksums: list[int] = []

    @property
    def key(self) -> tuple[str, int]:
        return self.passage.handoff.id, self.passage.handoff.epoch

    def send(self, segment: Segment) -> None:
        self.link.put(self, replace(segment, first_head=self.copy.sender_head, num_heads=self.copy.num_heads))

    def commit(self, first_tokens: Sequence[int]) -> None:
        self.link.put(self, tuple(first_tokens))

    def abort(self) -> None:
        self.link.put(self, None)

    def end(self, error: TransferError | None) -> None:
        """It has landed (None) or failed. The first call counts."""
        if not self.is_ended:
            self.error = error
            self.is_ended = True
            self.passage.outlet_ended()


# What waits for the link's thread: a segment to send, first tokens to commit with, or None for an abort.
_Job = tuple[Outlet, Segment | tuple[int, ...] | None]


class OutgoingLink:
    """Carries every handoff from this rank to one receiving rank, in the order in which they come.

    Fails as a whole: then every outlet on it ends with an error at once, even while its thread is still stuck in an
    operation that waits for its deadline.
    """

    def __init__(self, sender: Sender, address: str, *, epoch: int) -> None:
        self._sender = sender
        self._address = address
        self._epoch = epoch
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._frames: asyncio.Queue[pb.SenderFrame] = asyncio.Queue()
        self._lock = threading.Lock()
        self._outlets: dict[tuple[str, int], Outlet] = {}
        self._failure: TransferError | None = None
        self._link: Link | None = None
        self._conversation = asyncio.run_coroutine_threadsafe(self._converse(), sender.loop)

    @property
    def is_closed(self) -> bool:
        return self._failure is not None

    def add(self, outlet: Outlet) -> None:
        with self._lock:
            self._outlets[outlet.key] = outlet
        if self._failure:
            self._end(outlet, self._failure)

    def put(self, outlet: Outlet, job: Segment | tuple[int, ...] | None) -> None:
        self._jobs.put((outlet, job))

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
        self._jobs.put(None)
        self._conversation.cancel()
        for outlet in outlets:
            self._end(outlet, error)

    # On the event loop: the conversation.

    async def disconnected(self) -> None:
        """Wait until the conversation has ended and its channel is closed."""
        await asyncio.wait([asyncio.wrap_future(self._conversation)], timeout=self._sender.timeout_s)

    async def _converse(self) -> None:
        try:
            async with open_channel(self._address) as channel:
                stub = rpc.RankStub(channel)
                call = stub.Connect(self._outgoing_frames())
                frame = await asyncio.wait_for(anext(aiter(call)), self._sender.timeout_s)
                if frame.WhichOneof("frame") == "refused":
                    raise LayoutMismatch(f"{self._address} refuses {self._sender.name}: {frame.refused.reason}")
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
                backend=backend_for(self._sender.pool.device),
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
        if outlet:
            self._end(outlet, None if kind == "landed" else HandoffExpired(f"{self._address}: {frame.refused.reason}"))

    def _end(self, outlet: Outlet, error: TransferError | None) -> None:
        with self._lock:
            self._outlets.pop(outlet.key, None)
        outlet.end(error)

    # On the link's thread: the bytes.

    def _run(self, stub: rpc.RankStub, welcome: pb.Welcome) -> None:
        try:
            self._link = open_link(backend_for(self._sender.pool.device), self._link_end(stub, welcome))
            staging = torch.empty(0, dtype=torch.uint8, device=self._link.device)
            while (item := self._jobs.get()) is not None:
                outlet, job = item
                if outlet.is_ended:
                    continue
                if job is None or outlet.passage.is_aborted:
                    self._end(outlet, HandoffExpired(f"handoff {outlet.passage.handoff.id} was aborted"))
                elif isinstance(job, Segment):
                    num_bytes = self._sender.codec.num_bytes(job)
                    if num_bytes > staging.numel():
                        staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._link.device)
                    self._send(self._link, outlet, job, staging[:num_bytes])
                else:
                    self._commit(outlet, job)
        except TransferError as error:
            self.fail(error)

    def _send(self, link: Link, outlet: Outlet, segment: Segment, payload: torch.Tensor) -> None:
        pool = self._sender.pool
        self._sender.codec.pack(pool, segment, outlet.passage.slots(segment), payload)
        handoff, epoch = outlet.key
        announced = pb.Segment(
            handoff=handoff,
            epoch=epoch,
            number=len(outlet.checksums),
            first_layer=segment.first_layer,
            num_layers=segment.num_layers,
            first_token=segment.first_token,
            num_tokens=segment.num_tokens,
            num_bytes=payload.numel(),
            checksum=checksum(payload),
        )
        outlet.checksums.append(announced.checksum)
        self._announce(outlet, pb.SenderFrame(segment=announced))
        link.send(payload, timeout_s=operation_timeout(self._sender.timeout_s, payload.numel()))
        outlet.wire_bytes += payload.numel()

    def _commit(self, outlet: Outlet, first_tokens: tuple[int, ...]) -> None:
        handoff, epoch = outlet.key
        commit = pb.Commit(
            handoff=handoff,
            epoch=epoch,
            num_segments=len(outlet.checksums),
            checksum=combine_checksums(outlet.checksums),
            first_tokens=first_tokens,
        )
        self._announce(outlet, pb.SenderFrame(commit=commit))
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
