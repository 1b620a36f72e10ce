"""The replicas as one router sees them: who is there, who lives, what they last said, and their token streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from grpc import aio
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cluster.index.membership import Member, Membership
from cluster.index.prefix_index import PrefixIndex
from cluster.index.store import IndexReader
from cluster.rpc import worker_pb2 as pb
from cluster.rpc import worker_pb2_grpc as rpc
from cluster.wire.channel import error_of, open_channel
from cluster.wire.messages import tokens_from_proto
from cluster.words.errors import ReplicaLost
from cluster.words.request import Role, SampledToken

logger = logging.getLogger(__name__)

_SILENCE_S = 3.0  # a worker sends a frame every second at least
_RECONNECT_S = 0.2
_REFRESH_S = 0.25  # how often membership is read
_FOLLOW_MS = 500

TokenSink = Callable[[list[SampledToken] | ReplicaLost], None]


class Replica:
    """One worker: its channel, its frames, and whom its tokens go to. Lives on the event loop."""

    def __init__(self, member: Member, *, router: str, on_change: Callable[[], None]) -> None:
        self.member = member
        self.status = pb.Status(replica=member.replica)
        self.is_alive = False  # its frames are coming
        self.is_draining = asyncio.Event()  # set for good once it says so
        self.pending_tokens = 0  # of prompts that were meant for it, and that it has not answered yet
        self.num_requests = 0  # of ours, under way there
        self.promised_blocks = 0  # to requests of ours
        self.promised_streams = 0
        self._router = router
        self._on_change = on_change
        self._sinks: dict[int, TokenSink] = {}
        self._loss: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # of this life; done while dead
        self.channel = open_channel(member.address)
        self._task = asyncio.create_task(self._follow())

    @property
    def id(self) -> str:
        return self.member.replica

    @property
    def is_usable(self) -> bool:
        return self.is_alive and not self.status.draining

    def subscribe(self, stream: int, sink: TokenSink) -> None:
        """Hand every token of `stream` to `sink`, or ReplicaLost, once, if the frames end."""
        self._sinks[stream] = sink

    def unsubscribe(self, stream: int) -> None:
        self._sinks.pop(stream, None)

    def expect_answer(self, num_tokens: int) -> Callable[[], None]:
        """A prompt of so many tokens is meant for it. Call what is returned, once or more, when it has answered."""
        self.pending_tokens += num_tokens
        left = [num_tokens]

        def answered() -> None:
            if left:
                self.pending_tokens -= left.pop()

        return answered

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

    def forget(self) -> None:
        """It has left. Calls of ours fail as with any replica lost; the channel goes with the last of them."""
        self._task.cancel()
        self._lost("it has left")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.channel.close()

    async def _follow(self) -> None:
        while True:
            reason = "its frames ended"
            try:
                await self._read_frames()
            except aio.AioRpcError as error:
                reason = str(error_of(error, peer=self.id))
            except TimeoutError:
                reason = f"silent for {_SILENCE_S} s"
            self._lost(reason)
            await asyncio.sleep(_RECONNECT_S)

    async def _read_frames(self) -> None:
        frames = aiter(rpc.WorkerStub(self.channel).Frames(pb.FramesRequest(router=self._router)))
        while True:
            async with asyncio.timeout(_SILENCE_S):
                frame = await anext(frames, None)
            if frame is None:
                return
            if frame.HasField("status"):
                self.status = frame.status
                if frame.status.draining:
                    self.is_draining.set()
            if self._loss.done():
                self._loss = asyncio.get_running_loop().create_future()
            if not self.is_alive or frame.HasField("status"):
                self.is_alive = True
                self._on_change()
            for stream in frame.streams:
                if sink := self._sinks.get(stream.stream):
                    sink(tokens_from_proto(stream.tokens))

    def _lost(self, reason: str) -> None:
        if self.is_alive:
            logger.warning("replica lost replica=%s: %s", self.id, reason)
        self.is_alive = False
        if not self._loss.done():
            self._loss.set_result(reason)
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(ReplicaLost(f"{self.id}: {reason}"))
        self._on_change()


class Replicas:
    """Everyone who serves. Owns `redis`, and keeps up with membership and the prefix index as long as it is there.

    When it cannot, the replicas known stay: each one's own frames tell whether it lives.
    """

    def __init__(self, redis: Redis, *, name: str, router: str) -> None:
        self.index = PrefixIndex()
        self._redis = redis
        self._membership = Membership(redis, name=name)
        self._reader = IndexReader(redis, self.index, name=name)
        self._router = router
        self._replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._redis_was_there = True
        self._is_closing = False
        self.on_change: Callable[[], None] = lambda: None  # called whenever anything is heard of any replica

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._forever(self._refresh)),
            asyncio.create_task(self._forever(self._follow_index)),
        ]

    async def close(self) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        await self._redis.aclose()

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def usable(self, role: Role) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.member.role is role and replica.is_usable]

    def get(self, replica: str) -> Replica | None:
        return self._replicas.get(replica)

    async def changed(self, *, timeout_s: float) -> None:
        """Wait until something is heard of any replica. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._changed.wait()

    async def _refresh(self) -> None:
        members = {member.replica: member for member in await self._membership.members()}
        for replica, member in members.items():
            if replica not in self._replicas:
                await self._reader.load([replica])
                self._replicas[replica] = Replica(member, router=self._router, on_change=self._wake)
                logger.info("replica found replica=%s address=%s", replica, member.address)
        for replica in [r for r in self._replicas if r not in members and not self._replicas[r].is_alive]:
            await self._reader.forget(replica)
            self._replicas.pop(replica).forget()
            logger.info("replica gone replica=%s", replica)
        await asyncio.sleep(_REFRESH_S)

    async def _follow_index(self) -> None:
        await self._reader.follow(list(self._replicas), wait_ms=_FOLLOW_MS)

    async def _forever(self, action: Callable[[], Awaitable[None]]) -> None:
        while not self._is_closing:  # redis-py may swallow a cancellation
            try:
                await action()
                self._redis_was_there = True
            except RedisError as error:
                if self._redis_was_there:
                    logger.warning("Redis is away; routing goes on with what is known: %s", error)
                self._redis_was_there = False
                await asyncio.sleep(_REFRESH_S)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()
