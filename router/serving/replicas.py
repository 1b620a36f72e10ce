"""One router's replicas: liveness, reports, reservations and token streams of each; the index of their blocks, and the
availability of the model."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.index.membership import Member
from core.index.prefix_index import PrefixIndex
from core.process.supervisor import Supervisor
from core.rpc import worker_pb2 as pb
from core.types.errors import ClusterError, ModelUnavailable, ReplicaLost
from core.types.request import Role, SampledToken
from core.types.step_timing import StepTiming
from core.wire.messages import from_message, make_plausible, tokens_from_proto
from router.routing.candidates import ReplicaLoad

if TYPE_CHECKING:
    from router.serving.grpc_worker import Worker

logger = logging.getLogger(__name__)

NO_DECODE_REPLICA = "it has no decode replica"
_LOOK_S, _QUIET_LOOKS = 0.5, 7  # checks without a frame until a replica is lost; it sends at least one per second
_RECONNECT_S = 0.2

TokenSink = Callable[[list[SampledToken] | ReplicaLost], None]


class Replica:
    """Member replica. Follows the frames of `worker`, which it owns. Lives on the event loop."""

    def __init__(
        self,
        member: Member,
        worker: Worker,
        *,
        on_change: Callable[[], None],
        tasks: Supervisor,
        look_s: float = _LOOK_S,
    ) -> None:
        """look_s: interval between checks for frames."""
        self.member = member
        self.worker = worker
        self.status = pb.Status(replica=member.replica)
        self.is_alive = False  # frames are arriving
        self.is_draining = asyncio.Event()  # set when the replica reports that it drains; never cleared
        self.pending_tokens = 0  # prompt tokens reserved by this router and not computed yet
        self.num_requests = 0  # running calls of this router
        self.promised_blocks = 0  # blocks reserved by this router
        self.promised_streams = 0
        self._has_warned = False
        self._num_frames = 0  # frames of this connection
        self._num_quiet_looks = 0  # checks since the last frame
        self._framed = asyncio.Event()  # set by each frame, and when the connection ends
        self._on_change = on_change
        self._look_s = look_s
        self._load: ReplicaLoad | None = None  # cached; None after a change
        self._sinks: dict[int, TokenSink] = {}
        # Result: why the connection was lost. Replaced at the first frame of the next connection.
        self._loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = tasks.start(f"frames of {member.replica}", self._follow)

    @property
    def id(self) -> str:
        return self.member.replica

    @property
    def is_usable(self) -> bool:
        return self.is_alive and not self.status.draining

    @property
    def num_subscribed(self) -> int:
        """Number of subscribed token streams."""
        return len(self._sinks)

    def load(self) -> ReplicaLoad:
        """Return the current load. The result is shared: do not modify it."""
        if self._load is None:
            self._load = self._snapshot()
        return self._load

    def reserve(self, prompt_tokens: int, num_requests: int, num_blocks: int, num_streams: int) -> None:
        """Add these amounts, which may be negative, to what this router has reserved (see Reservation)."""
        self.pending_tokens += prompt_tokens
        self.num_requests += num_requests
        self.promised_blocks += num_blocks
        self.promised_streams += num_streams
        self._load = None

    def subscribe(self, stream: int, sink: TokenSink) -> None:
        """Pass every token of `stream` to `sink`, and ReplicaLost, once, if the frames end.

        Raises ReplicaLost if the frames have ended: tokens sent before the reconnect would be missing.
        """
        if not self.is_alive:
            raise ReplicaLost(f"{self.id}: its frames have ended")
        self._sinks[stream] = sink

    def unsubscribe(self, stream: int) -> None:
        self._sinks.pop(stream, None)

    async def has_read(self, num_frames: int) -> None:
        """Wait until num_frames frames of this connection have been processed, or the connection ends."""
        while self.is_alive and self._num_frames < num_frames:
            self._framed.clear()
            await self._framed.wait()

    async def unless_lost(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, but raise ReplicaLost as soon as the frames end; its calls may stay open for longer."""
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
            # Drop the task: its exception keeps this frame alive (reference cycle).
            del task, either

    def forget(self) -> None:
        """Stop following a replica that has left. Pending calls fail; the channel is freed with the last of them."""
        self._task.cancel()
        self._lost("the replica has left the deployment")

    async def close(self) -> None:
        """Stop following. Pending calls fail with ReplicaLost: closing a channel only cancels them."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._lost("this router has disconnected from the replica")
        await self.worker.close()

    async def _follow(self) -> None:
        while True:
            reason = "the token connection ended"
            try:
                await self._read_frames()
            except ClusterError as error:
                reason = str(error)
            except TimeoutError:
                reason = f"silent for {self._look_s * (_QUIET_LOOKS - 1)} s"
            except Exception as error:  # a replica that sends malformed frames cannot be trusted
                logger.exception("malformed frame replica=%s", self.id)
                reason = f"malformed frame: {error!r}"
            if self.is_alive:
                logger.warning("replica lost replica=%s: %s", self.id, reason)
            self._lost(reason)
            await asyncio.sleep(_RECONNECT_S)

    async def _read_frames(self) -> None:
        """Process frames until the connection ends. Raises TimeoutError if no more frames arrive."""
        self._num_frames = 0
        async with asyncio.timeout(None) as silence:
            watch = asyncio.create_task(self._watch_silence(silence))
            try:
                await self.worker.follow(self._take_next)
            finally:
                watch.cancel()

    async def _watch_silence(self, silence: asyncio.Timeout) -> None:
        """Time out `silence` after _QUIET_LOOKS checks without a frame.

        Checks are counted instead of seconds: after a stall of this process, received frames are processed first, so
        its replicas do not all count as lost.
        """
        self._num_quiet_looks = 0
        while self._num_quiet_looks < _QUIET_LOOKS:
            await asyncio.sleep(self._look_s)
            self._num_quiet_looks += 1
        silence.reschedule(asyncio.get_running_loop().time())

    def _take_next(self, frame: pb.Frame) -> None:
        self._num_quiet_looks = 0
        if frame.number > self._num_frames:
            raise ReplicaLost(f"{self.id}: frames {self._num_frames} to {frame.number - 1} are missing")
        if frame.number == self._num_frames:  # skip repeated frames
            self._take(frame)
            self._num_frames += 1
            self._framed.set()

    def _take(self, frame: pb.Frame) -> None:
        if len(frame.plain_streams) != len(frame.plain_token_ids):
            raise ReplicaLost(
                f"{self.id}: a frame has {len(frame.plain_token_ids)} tokens for {len(frame.plain_streams)} streams"
            )
        has_status = frame.HasField("status")
        if has_status:
            if not make_plausible(frame.status) and not self._has_warned:
                self._has_warned = True
                logger.warning("ignored implausible metrics replica=%s", self.id)
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
                self._deliver(stream, sink, SampledToken(token_id))
        for update in frame.streams:
            if sink := self._sinks.get(update.stream):
                self._deliver(update.stream, sink, update)

    def _deliver(self, stream: int, sink: TokenSink, update: SampledToken | pb.StreamTokens) -> None:
        """Pass tokens to their sink. An error ends only that stream."""
        try:
            sink([update] if isinstance(update, SampledToken) else tokens_from_proto(update.tokens))
        except Exception as error:
            logger.exception("failed to deliver tokens replica=%s stream=%d", self.id, stream)
            self.unsubscribe(stream)
            sink(ReplicaLost(f"{self.id}: failed to deliver tokens: {error!r}"))

    def _lost(self, reason: str) -> None:
        self.is_alive = False
        if not self._loss.done():
            self._loss.set_result(reason)
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(ReplicaLost(f"{self.id}: {reason}"))
        self._framed.set()
        self._on_change()

    def _snapshot(self) -> ReplicaLoad:
        status = self.status
        num_reported = status.running + status.waiting
        return ReplicaLoad(
            member=self.member,
            available_blocks=status.blocks_free + status.blocks_cached,
            promised_blocks=self.promised_blocks,
            promised_streams=self.promised_streams,
            num_streams=max(num_reported, self.num_requests),
            num_reported_streams=num_reported,
            num_waiting=status.waiting,
            queued_tokens=max(status.queued_tokens, self.pending_tokens),
            prefill_tokens_per_s=status.prefill_tokens_per_s,
            decode_step_s=status.decode_step_s,
            tokens_per_row=status.tokens_per_row,
            drafted_per_row=status.drafted_per_row,
            link_bytes_per_s=status.link_bytes_per_s,
            host_bytes_per_s=status.host_bytes_per_s,
            disk_bytes_per_s=status.disk_bytes_per_s,
            timing=from_message(StepTiming, status.timing) if status.HasField("timing") else None,
            num_reported_local_decodes=status.local_decodes.running + status.local_decodes.waiting,
            num_waiting_local_decodes=status.local_decodes.waiting,
            local_decode_blocks=status.local_decodes.blocks,
        )


@dataclass(frozen=True)
class DecodeStream:
    """Token stream of a choice: its replica, and the stream's key there."""

    replica: Replica
    key: int


class Replicas:
    """Registry of all replicas. Lives on the event loop; `router.serving.discovery` keeps it up to date."""

    def __init__(
        self, connect: Callable[[Member], Worker], *, tasks: Supervisor | None = None, model: str = ""
    ) -> None:
        """tasks: supervisor of the tasks that follow the replicas; None: a new one. model: name used by clients."""
        self.availability = Availability(self.may_answer, model=model)
        self._tasks = tasks or Supervisor()
        self.index = PrefixIndex()
        self.on_change: Callable[[], None] = lambda: None  # called after each report of any replica
        self._connect = connect
        self._replicas: dict[str, Replica] = {}
        # Checkpoints that a prefix needs, by id of the replicas that report checkpoints; see CacheShape.
        self.num_checkpoints: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._next_stream = 1
        self._max_tokens: int | None = None

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def usable(self, role: Role) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.member.role is role and replica.is_usable]

    def answerers(self) -> Iterator[Replica]:
        """Yield the replicas that can decode: decode replicas, and prefill replicas that allow local decodes."""
        yield from self.usable(Role.DECODE)
        yield from (replica for replica in self.usable(Role.PREFILL) if replica.member.max_local_decodes)

    def may_answer(self) -> bool:
        return any(True for _ in self.answerers())

    def num_usable(self, role: Role) -> int:
        return len(self.usable(role))

    def max_tokens(self) -> int | None:
        """Return the length of the longest sequence that a decode replica can hold; None until one is known."""
        self._max_tokens = max((one.member.max_tokens for one in self.usable(Role.DECODE)), default=self._max_tokens)
        return self._max_tokens

    def get(self, replica: str) -> Replica | None:
        return self._replicas.get(replica)

    def new_streams(self, count: int) -> int:
        """Allocate `count` consecutive stream keys, unique within this router, and return the first."""
        first = self._next_stream
        self._next_stream += count
        return first

    async def changed(self, *, timeout_s: float) -> None:
        """Wait for a report of any replica. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._changed.wait()

    def add(self, member: Member) -> None:
        if other := next((one.id for one in self if one.member.layout != member.layout), None):
            logger.warning(
                "replicas exchange no KV: unlike weights, kv settings or kv_basis.safetensors replica=%s other=%s",
                member.replica,
                other,
            )
        self._replicas[member.replica] = Replica(member, self._connect(member), on_change=self._wake, tasks=self._tasks)
        if num_checkpoints := member.cache.num_checkpoints:
            self.num_checkpoints[member.replica] = num_checkpoints
        logger.info("replica found replica=%s address=%s", member.replica, member.address)

    def remove(self, replica: str) -> None:
        self._replicas.pop(replica).forget()
        self.num_checkpoints.pop(replica, None)
        logger.info("replica gone replica=%s", replica)

    async def close(self) -> None:
        """Disconnect from all replicas; requests that wait for one get an error."""
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        self._wake()  # needed if there were no replicas

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()


class Availability:
    """Tracker of a model's availability: the time for which checks have found no replica that can answer."""

    def __init__(self, may_answer: Callable[[], bool], *, model: str) -> None:
        """may_answer: returns whether a replica can answer now. model: name used by clients."""
        self._may_answer = may_answer
        self._model = model
        self._now = asyncio.get_running_loop().time
        self._since: float | None = None
        self._has_ended = False
        self.missing = NO_DECODE_REPLICA  # for the error while no replica can answer

    def look(self) -> float | None:
        """Check for a replica that can answer. Return None if there is one, else the seconds since none was found."""
        if self._may_answer():
            self._since = None
            return None
        now = self._now()
        self._since = now if self._since is None else self._since
        return now - self._since

    def check(self, *, within_s: float = math.inf) -> None:
        """Raise ModelUnavailable if no replica could answer for longer than within_s, or after `end`."""
        if self._has_ended or (within_s < math.inf and (self.look() or 0.0) > within_s):
            raise self.error()

    def end(self) -> None:
        """Mark the model as no longer served by this router, so that no request waits for a replica."""
        self._has_ended = True

    def error(self, *, num_tokens: int = 0) -> ModelUnavailable:
        """num_tokens: length of the sequence that a replica must hold."""
        called = f"model {self._model!r}" if self._model else "this model"
        why = "this router leaves it" if self._has_ended else self.missing
        if why == NO_DECODE_REPLICA and num_tokens:
            why += f" that holds {num_tokens} tokens"
        return ModelUnavailable(f"{called} cannot be served at present: {why}", retry_after_s=1.0)
