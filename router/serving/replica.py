"""One replica as a router sees it: whether it lives, what it last said, what it was asked since, its token streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from core.index.membership import Member
from core.process.supervisor import Supervisor
from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError, ReplicaLost
from core.types.request import SampledToken
from core.wire.messages import timing_from_proto, tokens_from_proto
from core.wire.status_check import make_plausible
from router.routing.replica_load import ReplicaLoad
from router.serving.worker import Worker

logger = logging.getLogger(__name__)

_LOOK_S, _QUIET_LOOKS = 0.5, 7  # after so many without a frame it is lost; it sends one every second at least
_RECONNECT_S = 0.2

TokenSink = Callable[[list[SampledToken] | ReplicaLost], None]


class Replica:
    """Follows the frames of `worker`, which it owns, for as long as it is a member. Lives on the event loop."""

    def __init__(
        self,
        member: Member,
        worker: Worker,
        *,
        on_change: Callable[[], None],
        tasks: Supervisor,
        look_s: float = _LOOK_S,
    ) -> None:
        """look_s: how often it is looked whether a frame has come."""
        self.member = member
        self.worker = worker
        self.status = pb.Status(replica=member.replica)
        self.is_alive = False  # its frames are coming
        self.is_draining = asyncio.Event()  # set for good once it says so
        self.pending_tokens = 0  # of prompts that were meant for it, and that it has not answered yet
        self.num_requests = 0  # of ours, under way there
        self.promised_blocks = 0  # to requests of ours
        self.promised_streams = 0
        self._has_told_nonsense = False
        self._num_frames = 0  # of this life
        self._num_quiet_looks = 0  # since the last of them
        self._framed = asyncio.Event()  # set by each, and by their end
        self._on_change = on_change
        self._look_s = look_s
        self._load: ReplicaLoad | None = None  # None: something has changed
        self._sinks: dict[int, TokenSink] = {}
        self._loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # of this life; done while dead
        self._task = tasks.start(f"frames of {member.replica}", self._follow)

    @property
    def id(self) -> str:
        return self.member.replica

    @property
    def is_usable(self) -> bool:
        return self.is_alive and not self.status.draining

    @property
    def num_subscribed(self) -> int:
        """Token streams that somebody listens to."""
        return len(self._sinks)

    def load(self) -> ReplicaLoad:
        """As it is now; not to be changed."""
        if self._load is None:
            self._load = self._weighed()
        return self._load

    def reserve(self, prompt_tokens: int, num_requests: int, num_blocks: int, num_streams: int) -> None:
        """Count so much more, or less, as asked of it: see Reservation."""
        self.pending_tokens += prompt_tokens
        self.num_requests += num_requests
        self.promised_blocks += num_blocks
        self.promised_streams += num_streams
        self._load = None

    def subscribe(self, stream: int, sink: TokenSink) -> None:
        """Hand every token of `stream` to `sink`, or ReplicaLost, once, if the frames end.

        Raises ReplicaLost where they have ended: what came before they begin anew would be missing.
        """
        if not self.is_alive:
            raise ReplicaLost(f"{self.id}: its frames have ended")
        self._sinks[stream] = sink

    def unsubscribe(self, stream: int) -> None:
        self._sinks.pop(stream, None)

    async def has_read(self, num_frames: int) -> None:
        """Until so many frames of this life have been handed on, or it ends."""
        while self.is_alive and self._num_frames < num_frames:
            self._framed.clear()
            await self._framed.wait()

    async def unless_lost(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, but raise ReplicaLost once the frames have ended: its calls may stay open for longer."""
        task = asyncio.create_task(work)
        loss = self._loss
        either: set[asyncio.Future[Any]] = {task, loss}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ReplicaLost(f"{self.id}: {loss.result()}")
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task, either  # they know the error that passes here, and it knows this line: a circle

    def forget(self) -> None:
        """It has left. Calls of ours fail as with any replica lost; the channel goes with the last of them."""
        self._task.cancel()
        self._lost("it has left")

    async def close(self) -> None:
        """Nobody follows it any more. Who still waits for it hears so, for a channel that closes cancels its calls, and
        nothing else would end them."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._lost("this router has left it")
        await self.worker.close()

    async def _follow(self) -> None:
        while True:
            reason = "its frames ended"
            try:
                await self._read_frames()
            except ClusterError as error:
                reason = str(error)
            except TimeoutError:
                reason = f"silent for {self._look_s * (_QUIET_LOOKS - 1)} s"
            except Exception as error:  # a frame that cannot be read: whoever sends it is not to be relied upon
                logger.exception("replica=%s sent a frame that cannot be read", self.id)
                reason = f"a frame cannot be read: {error!r}"
            if self.is_alive:
                logger.warning("replica lost replica=%s: %s", self.id, reason)
            self._lost(reason)
            await asyncio.sleep(_RECONNECT_S)

    async def _read_frames(self) -> None:
        """Follow them until they end. Raises TimeoutError when none comes any more."""
        self._num_frames = 0
        async with asyncio.timeout(None) as silence:
            watch = asyncio.create_task(self._watch_silence(silence))
            try:
                await self.worker.follow(self._take_next)
            finally:
                watch.cancel()

    async def _watch_silence(self, silence: asyncio.Timeout) -> None:
        """Looks are counted, not seconds: where this process itself stood still, what has come meanwhile is read first,
        and its replicas are not all taken for lost."""
        self._num_quiet_looks = 0
        while self._num_quiet_looks < _QUIET_LOOKS:
            await asyncio.sleep(self._look_s)
            self._num_quiet_looks += 1
        silence.reschedule(asyncio.get_running_loop().time())

    def _take_next(self, frame: pb.Frame) -> None:
        self._num_quiet_looks = 0
        if frame.number > self._num_frames:
            raise ReplicaLost(f"{self.id}: a frame is missing before number {frame.number}")
        if frame.number == self._num_frames:  # not one that came before
            self._take(frame)
            self._num_frames += 1
            self._framed.set()

    def _take(self, frame: pb.Frame) -> None:
        if len(frame.plain_streams) != len(frame.plain_token_ids):
            raise ReplicaLost(f"{self.id}: a frame has tokens that are of no stream, or streams without one")
        has_status = frame.HasField("status")
        if has_status:
            if not make_plausible(frame.status) and not self._has_told_nonsense:
                self._has_told_nonsense = True
                logger.warning("replica=%s says what cannot be measured; that is left out", self.id)
            self.status = frame.status
            self._load = None
            if frame.status.draining:
                self.is_draining.set()
        if self._loss.done():
            self._loss = asyncio.get_running_loop().create_future()
        if has_status or not self.is_alive:
            self.is_alive = True
            self._on_change()
        for stream, token_id in zip(frame.plain_streams, frame.plain_token_ids, strict=True):
            if sink := self._sinks.get(stream):
                self._hand_on(stream, sink, SampledToken(token_id))
        for told in frame.streams:
            if sink := self._sinks.get(told.stream):
                self._hand_on(told.stream, sink, told)

    def _hand_on(self, stream: int, sink: TokenSink, told: SampledToken | pb.StreamTokens) -> None:
        """What cannot be read, or taken, ends that stream alone."""
        try:
            sink([told] if isinstance(told, SampledToken) else tokens_from_proto(told.tokens))
        except Exception as error:
            logger.exception("replica=%s stream=%d brought what cannot be taken", self.id, stream)
            self.unsubscribe(stream)
            sink(ReplicaLost(f"{self.id}: its tokens cannot be read: {error!r}"))

    def _lost(self, reason: str) -> None:
        self.is_alive = False
        if not self._loss.done():
            self._loss.set_result(reason)
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(ReplicaLost(f"{self.id}: {reason}"))
        self._framed.set()
        self._on_change()

    def _weighed(self) -> ReplicaLoad:
        status = self.status
        told = status.running + status.waiting
        return ReplicaLoad(
            member=self.member,
            available_blocks=status.blocks_free + status.blocks_cached,
            promised_blocks=self.promised_blocks,
            promised_streams=self.promised_streams,
            num_streams=max(told, self.num_requests),
            num_told_streams=told,
            num_waiting=status.waiting,
            queued_tokens=max(status.queued_tokens, self.pending_tokens),
            prefill_tokens_per_s=status.prefill_tokens_per_s,
            decode_step_s=status.decode_step_s,
            tokens_per_row=status.tokens_per_row,
            drafted_per_row=status.drafted_per_row,
            link_bytes_per_s=status.link_bytes_per_s,
            host_bytes_per_s=status.host_bytes_per_s,
            disk_bytes_per_s=status.disk_bytes_per_s,
            timing=timing_from_proto(status.timing) if status.HasField("timing") else None,
            num_reported_local_decodes=status.local_decodes.running + status.local_decodes.waiting,
            num_waiting_local_decodes=status.local_decodes.waiting,
            local_decode_blocks=status.local_decodes.blocks,
        )
