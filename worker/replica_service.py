"""Rank 0's service to the world: its step loop, its frames, its presence in Redis, and its way out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from core.index.membership import Member
from core.index.presence import Presence
from core.index.redis_client import connect_redis
from core.process.supervisor import Supervisor
from core.rpc import worker_pb2 as pb
from core.types.errors import ReplicaFailed, ReplicaLost
from core.types.rank_api import RankStatus
from core.types.tier import Tier
from core.wire.frames import STATUS_S, FrameHub, StreamToken
from core.wire.rank_server import RankHost
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.rank_transfer import Shipment
from worker.metrics import MetricsServer, metrics_registry
from worker.rank_liveness import watch_ranks
from worker.replica_engine import ReplicaEngine
from worker.step_loop import Command, StepLoop

logger = logging.getLogger(__name__)

_LOOK_S = 0.01
_VITAL = "presence"  # the task without which a replica is none
_IDLE_S = 0.5  # how often an idle engine gives a sign of life to its other ranks


class RoleWorker(Protocol):
    """What a role does step by step. All of it runs on the step thread."""

    replica: ReplicaEngine

    def landed(self, rank: int, landing: Landing, /) -> None:
        """A handoff's KV, or a prefix that we fetch, is whole on one of our ranks."""
        ...

    def shipped(self, rank: int, shipment: Shipment, /) -> None:
        """One of our ranks has nothing more to send for a handoff."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests that the replica still has something to do for."""
        ...

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        ...

    def status(self) -> pb.Status: ...

    def take_tokens(self) -> Mapping[str, Sequence[StreamToken]]:
        """The tokens sampled since the last call, per router."""
        ...


class ReplicaService:
    """Drives a worker on the step thread and tells the event loop about it."""

    def __init__(self, worker: RoleWorker, host: RankHost, hub: FrameHub, *, replica: str) -> None:
        self._worker = worker
        self._host = host
        self._hub = hub
        self._replica = replica
        self._loop = StepLoop(step=self._step, idle=self._idle, idle_s=_IDLE_S, ended=lambda: self._end(None))
        self._outcome: Future[None] = Future()  # of the step loop, or why it is not waited for
        self._watching: Future[None] | None = None
        self._presence: Presence | None = None
        self._presence_task: Future[None] | None = None
        self._metrics: MetricsServer | None = None
        self._tasks = Supervisor(died=self._task_died)
        self._status = pb.Status(replica=replica)
        self._status_due = 0.0  # by time.monotonic
        self._num_requests = 0  # after the last step
        self._is_counted = False  # they are all that there will ever be
        self.is_draining = False

    def start(
        self,
        *,
        index_url: str,
        name: str,
        key: bytes,
        member: Member,
        other_ranks: Sequence[str],
        model: str,
        metrics_host: str,
    ) -> None:
        """Begin to serve: from now on routers find this replica. It ends as soon as one of its other ranks is lost.

        name: of the deployment. key: by which its members sign. model: name that clients use for it. metrics_host:
        address on which Prometheus finds the metrics. Raises
        DeployError.
        """
        self._publish()
        labels = {"deployment": name, "model": model, "replica": self._replica, "role": member.role.value}
        self._metrics = MetricsServer(metrics_registry(lambda: self._status, labels), host=metrics_host)
        member = replace(member, metrics_address=self._metrics.address)
        self._watching = self._host.spawn(self._watch(other_ranks))
        self._loop.start()
        self._presence = Presence(connect_redis(index_url), name=name, key=key, member=member, snapshot=self._snapshot)
        self._presence_task = self._host.spawn(self._tasks.keep_running(_VITAL, self._presence.run))

    def post(self, command: Command) -> None:
        """Run something on the step thread, between steps."""
        self._loop.post(command)

    def num_frames(self, router: str) -> int:
        """So many bring this router all that it was told so far; 0: it does not listen. On the event loop."""
        return self._hub.num_frames(router)

    def run(self) -> None:
        """Return when the step loop has been stopped; raise what ended it otherwise, or that a rank is lost."""
        self._outcome.result()
        self._loop.run()

    def status(self) -> RankStatus:
        status = self._status
        is_drained = self._is_counted and not self._num_requests
        state = "ready" if not self.is_draining else "drained" if is_drained else "draining"
        blocks = {"total": status.blocks_total, "free": status.blocks_free, "cached": status.blocks_cached}
        return {"state": state, "running": status.running, "waiting": status.waiting, "blocks": blocks}  # type: ignore[typeddict-item]

    def check_takes_work(self) -> None:
        """Raises ReplicaLost when it leaves. What is let in is posted in the same turn of the event loop."""
        if self.is_draining:
            raise ReplicaLost("this replica takes no new work")

    def drain(self) -> None:
        """Take no new work. Routers are told at once, by their frames: who heard it only after the step under way would
        ask again and again meanwhile."""
        self.is_draining = True
        self._host.post(self._tell, {}, self._status, {})
        self._host.post(self.post, self._count_what_is_left)  # by the event loop: behind what it has just let in

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Leave the index and the membership, and end the step loop."""
        self._leave(timeout_s=timeout_s)
        self._loop.stop(self._worker.replica.stop, timeout_s=timeout_s)

    def end_whole(self, *, within_s: float) -> None:
        """As `stop`, after it has drained, and so that the engine's blocks are all free or cached, and nobody works on
        them any more: another service may go on with them. Raises ReplicaFailed where that is not so in time."""
        deadline = time.monotonic() + within_s
        if self.status()["state"] != "drained":
            raise ReplicaFailed("it has not drained")
        self._leave(timeout_s=within_s)
        while not self._is_whole(timeout_s=deadline - time.monotonic()):
            time.sleep(_LOOK_S)  # the last handoffs are being closed
        self._loop.stop(self._worker.replica.let_ranks_go, timeout_s=deadline - time.monotonic())
        self._outcome.result(0)

    def _leave(self, *, timeout_s: float) -> None:
        if self._metrics:
            self._metrics.close()
        if self._watching:
            self._watching.cancel()
        if self._presence and self._presence_task:
            self._presence_task.cancel()
            self._host.call(self._presence.leave(), timeout_s=timeout_s)

    def _is_whole(self, *, timeout_s: float) -> bool:
        answer: Future[bool] = Future()
        self.post(lambda: answer.set_result(not self._worker.num_requests and self._worker.replica.is_whole))
        try:
            return answer.result(max(0.0, timeout_s))
        except TimeoutError:
            raise ReplicaFailed("blocks are still held, although it has drained") from None

    async def _watch(self, other_ranks: Sequence[str]) -> None:
        try:
            await watch_ranks(other_ranks, self._host.identity)
        except* ReplicaLost as lost:
            logger.error("this replica cannot go on: %s", lost.exceptions[0])
            self._end(ReplicaLost(str(lost.exceptions[0])))
        except* Exception as bugs:  # nobody would notice any more that a rank is lost
            logger.exception("this replica cannot go on: its other ranks are not watched any more")
            self._end(ReplicaLost(f"the watch over its ranks has ended: {bugs.exceptions[0]!r}"))

    def _task_died(self, name: str) -> None:
        if name == _VITAL and name in self._tasks.failing:
            self._end(ReplicaLost(f"its task {name} keeps dying"))

    def _end(self, error: ReplicaLost | None) -> None:
        """Take no new work, and let routers and controller know at once. From any thread; the first call counts."""
        self.is_draining = True
        self._host.post(self._hub.close)
        with suppress(InvalidStateError):
            if error:
                self._outcome.set_exception(error)
            else:
                self._outcome.set_result(None)

    def _step(self) -> bool:
        did_work = self._worker.step()
        is_as_told = did_work and self._num_requests == self._worker.num_requests
        self._publish(has_status=not is_as_told or time.monotonic() >= self._status_due)
        return did_work

    def _idle(self) -> None:
        self._worker.replica.heartbeat()
        self._publish()

    def _count_what_is_left(self) -> None:
        self._publish()
        self._is_counted = True

    def _publish(self, *, has_status: bool = True) -> None:
        """Everything that is new since the last step goes to the event loop in one call."""
        status = self._new_status() if has_status else self._status
        tokens, changes = self._worker.take_tokens(), self._worker.replica.take_changes()
        if tokens or changes or status != self._status:
            self._status = status
            self._host.post(self._tell, tokens, status, changes)

    def _new_status(self) -> pb.Status:
        self._num_requests = self._worker.num_requests
        self._status_due = time.monotonic() + STATUS_S
        status = self._worker.status()
        status.replica = self._replica
        status.draining = self.is_draining
        return status

    def _tell(self, tokens: Mapping[str, Any], status: pb.Status, changes: Mapping[bytes, Tier | None]) -> None:
        if self.is_draining and not status.draining:  # it was said on the step thread before that
            status, said = pb.Status(draining=True), status
            status.MergeFrom(said)
        self._hub.publish(tokens, status)
        if changes and self._presence:
            self._presence.publish(changes)

    async def _snapshot(self) -> Mapping[bytes, Tier]:
        answer: asyncio.Future[Mapping[bytes, Tier]] = asyncio.get_running_loop().create_future()
        self.post(lambda: self._host.post(answer.set_result, self._worker.replica.held()))
        return await answer
