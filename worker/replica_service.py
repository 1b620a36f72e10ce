"""Service of rank 0: step loop, frames, presence in Redis, reports of the other ranks, and shutdown."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
from grpc import aio

from core.identity.credentials import Identity
from core.identity.deployment_secrets import Purpose
from core.identity.process_name import ProcessName
from core.index.membership import Member, signed_record
from core.index.presence import Presence
from core.index.redis_client import connect_redis
from core.process.supervisor import Supervisor
from core.rpc import worker_pb2 as pb
from core.types.errors import ReplicaFailed, ReplicaLost
from core.types.handoff import Handoff
from core.types.network import is_loopback
from core.types.rank_api import RankStatus
from core.types.tier import Tier
from core.types.validation import check
from core.wire.channel import open_channel
from core.wire.frames import STATUS_S, FrameHub
from core.wire.messages import from_message, sequence_from_proto
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from engine.scheduler.prompts import Prompt
from engine.scheduler.sequence import Sequence
from kvtransfer.protocol.incoming_transfers import Fetch, PrefixFetches
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.protocol.validation import check_handoff
from kvtransfer.transfer.receiver import Receiver
from kvtransfer.transfer.wire_messages import Part
from worker.fetch_client import PrefixSourceChannels
from worker.grammars import Grammars
from worker.metrics import MetricsServer, metrics_registry
from worker.rank_group import OtherRanks
from worker.rank_setup import RankSetup
from worker.request_validation import check_request
from worker.step_loop import Command, StepLoop
from worker.worker import Worker

logger = logging.getLogger(__name__)

_LOOK_S = 0.01
_VITAL = "presence"  # the replica ends if this task keeps failing
_RECONNECT_S = 1.0
_IDLE_S = 0.5  # interval of an idle engine's heartbeats to its other ranks


class ReplicaService:
    """Runner of a worker on the step thread; publishes its results on the event loop.

    `open` sets the worker, before any report or request.
    """

    worker: Worker
    max_tokens: int  # per sequence

    def __init__(self, setup: RankSetup, others: OtherRanks, hub: FrameHub) -> None:
        self.others = others
        self._setup = setup
        self._host = setup.host
        self._hub = hub
        self._prefix_sources = PrefixSourceChannels(setup.host.identity)
        self._loop = StepLoop(step=self._step, idle=self._idle, idle_s=_IDLE_S, ended=lambda: self._end(None))
        self._outcome: Future[None] = Future()  # result of the step loop, or the error that ends the replica early
        self._watching: Future[None] | None = None
        self._record = b""  # see RankStatus
        self._presence: Presence | None = None
        self._presence_task: Future[None] | None = None
        self._metrics: MetricsServer | None = None
        self._tasks = Supervisor(died=self._task_died)
        self._status = pb.Status(replica=setup.replica)
        self._status_due = 0.0  # by time.monotonic
        self._num_requests = 0  # after the last step
        self._is_counted = False  # draining, and _num_requests includes every accepted request
        self.is_draining = False

    def open(self, worker: Worker, layout: KVLayout, grammars: Grammars, *, vocab_size: int, max_tokens: int) -> None:
        self.worker, self.max_tokens = worker, max_tokens
        self._layout, self._grammars, self._vocab_size = layout, grammars, vocab_size

    def start(self, member: Member) -> None:
        """Start serving and announce this replica to routers. It ends when one of its other ranks is lost.

        Raises DeployError.
        """
        setup, spec, credentials = self._setup, self._setup.spec, self._setup.launch.credentials
        self._publish()
        labels = {"deployment": spec.name, "model": spec.model.name, "replica": setup.replica, "role": setup.role.value}
        # If the routers' admin listeners are on loopback, so are the metrics, because Prometheus runs beside them.
        metrics_host = spec.router.admin_host if is_loopback(spec.router.admin_host) else self._host.host
        self._metrics = MetricsServer(metrics_registry(lambda: self._status, labels), host=metrics_host)
        member = replace(member, metrics_address=self._metrics.address)
        self._watching = self._host.spawn(self._watch(setup.addresses[1:]))
        self._loop.start()
        key = credentials.key(Purpose.MEMBERS)
        self._record = signed_record(member, key)
        self._presence = Presence(
            connect_redis(credentials.index_url), name=spec.name, key=key, member=member, snapshot=self._snapshot
        )
        self._presence_task = self._host.spawn(self._tasks.keep_running(_VITAL, self._presence.run))

    def post(self, command: Command) -> None:
        """Run a command on the step thread, between steps."""
        self._loop.post(command)

    def run(self) -> None:
        """Block until the step loop is stopped. Raises the error that ended it, or ReplicaLost for a lost rank."""
        self._outcome.result()
        self._loop.run()

    def status(self) -> RankStatus:
        status = self._status
        is_drained = self._is_counted and not self._num_requests
        state = "ready" if not self.is_draining else "drained" if is_drained else "draining"
        blocks = {"total": status.blocks_total, "free": status.blocks_free, "cached": status.blocks_cached}
        counts = {"running": status.running, "waiting": status.waiting}
        return {"state": state, **counts, "blocks": blocks, "member": self._record}  # type: ignore[typeddict-item]

    # Requests, on the event loop.

    def check_takes_work(self) -> None:
        """Raise ReplicaLost while draining. The caller must post accepted work in the same event-loop iteration."""
        if self.is_draining:
            raise ReplicaLost("replica is draining and takes no new work")

    async def sequence_of(self, message: pb.Sequence) -> Sequence:
        """Parse and validate a sequence, and compile its grammar. Raises RequestError."""
        request = sequence_from_proto(message)
        check_request(request, vocab_size=self._vocab_size, max_tokens=self.max_tokens)
        first, layout = request.choices[0], self._layout  # after a migration, any of the client's choices
        sequence = Sequence(
            request, first, model=layout.model, block_size=layout.block_size, max_context=self.max_tokens
        )
        sequence.sampling_row.mask = await self._grammars.mask_of(request)
        return sequence

    def handoff_of(self, message: pb.Handoff) -> Handoff:
        """Parse and validate a handoff that this replica will fill. Raises RequestError."""
        handoff = from_message(Handoff, message)
        check_handoff(handoff, self._layout)
        return handoff

    def num_frames(self, router: str) -> int:
        """Return the number of frames published to a router; 0: not connected."""
        return self._hub.num_frames(router)

    # Reports of ranks, from any thread.

    def on_part(self, rank: int, part: Part) -> None:
        """Post a landing, a shipment or a load result of one rank."""
        if isinstance(part, Landing):
            self.post(lambda: self.worker.landed(rank, part))
        elif isinstance(part, Shipment):
            self.post(lambda: self.worker.shipped(rank, part))
        else:
            self.post(lambda: self.worker.fetches.loaded(rank, part))

    def on_report(self, rank: int, part: Part) -> None:
        """Post a report of another rank. Raises RequestError for an unknown rank."""
        num_ranks = len(self._setup.addresses)
        check(0 < rank < num_ranks, "rank", f"must be another rank of this replica, from 1 to {num_ranks - 1}")
        self.on_part(rank, part)

    def close_handoff(self, handoff: str, then: Callable[[], None]) -> None:
        """Close a handoff on the other ranks, then run a command on the step thread."""

        async def close() -> None:
            try:
                await self.others.close_handoff(handoff)
            except ReplicaLost as error:  # the gang is broken, so the blocks stay in quarantine
                logger.error("failed to close handoff=%s: %s", handoff, error)
                return
            self.post(then)

        self._host.spawn(close())

    def make_fetches(self, layout: KVLayout, receiver: Receiver, blocks: BlockManager) -> PrefixFetches[Prompt]:
        """Create the registry of this replica's prefix fetches; it reports failures to the worker."""
        setup = self._setup
        return PrefixFetches(
            receiver,
            blocks,
            replica=setup.replica,
            addresses=setup.addresses,
            layout=layout,
            timeout_s=setup.spec.timeouts.transfer_s,
            close_elsewhere=self.close_handoff,
            call=lambda fetch: self._host.spawn(
                self._prefix_sources.fetch(fetch, self.others, functools.partial(self._missed, fetch))
            ),
        )

    def _missed(self, fetch: Fetch[Prompt], reason: str) -> None:
        self.post(lambda: self.worker.fetches.missed(fetch, reason))

    # Drain and end.

    def drain(self) -> None:
        """Take no new work.

        Publishes the state at once instead of after the current step, because routers would retry meanwhile.
        """
        self.is_draining = True
        self._host.post(self._publish_now, {}, self._status, {})
        self._host.post(self.post, self._count_remaining)  # via the event loop, behind work accepted there

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Leave the index and the membership, then end the step loop."""
        self._leave(timeout_s=timeout_s)
        self._loop.stop(self.worker.stop, timeout_s=timeout_s)

    async def close(self) -> None:
        """Close the channels to prefix sources. Runs on the event loop."""
        await self._prefix_sources.close()

    def end_whole(self, *, within_s: float) -> None:
        """Stop a drained replica once all its blocks are free or cached, so that a successor can use them.

        Raises ReplicaFailed if the replica has not drained, or if blocks are still in use after `within_s`.
        """
        deadline = time.monotonic() + within_s
        if self.status()["state"] != "drained":
            raise ReplicaFailed("replica has not drained")
        self._leave(timeout_s=within_s)
        while not self._is_whole(timeout_s=deadline - time.monotonic()):
            time.sleep(_LOOK_S)  # the last handoffs are being closed
        self._loop.stop(self.worker.stop_ranks, timeout_s=deadline - time.monotonic())
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
        self.post(lambda: answer.set_result(not self.worker.num_requests and self.worker.is_whole))
        try:
            return answer.result(max(0.0, timeout_s))
        except TimeoutError:
            raise ReplicaFailed("blocks are still in use although the replica has drained") from None

    async def _watch(self, other_ranks: list[str]) -> None:
        try:
            await watch_ranks(other_ranks, self._host.identity)
        except* ReplicaLost as lost:
            logger.error("replica ends: %s", lost.exceptions[0])
            self._end(ReplicaLost(str(lost.exceptions[0])))
        except* Exception as bugs:  # without the watch, a lost rank would go unnoticed
            logger.exception("replica ends: rank watch failed")
            self._end(ReplicaLost(f"rank watch failed: {bugs.exceptions[0]!r}"))

    def _task_died(self, name: str) -> None:
        if name == _VITAL and name in self._tasks.failing:
            self._end(ReplicaLost(f"task {name} keeps failing"))

    def _end(self, error: ReplicaLost | None) -> None:
        """End the replica: take no new work and close all frame streams. Thread-safe; the first call wins."""
        self.is_draining = True
        self._host.post(self._hub.close)
        with suppress(InvalidStateError):
            if error:
                self._outcome.set_exception(error)
            else:
                self._outcome.set_result(None)

    def _step(self) -> bool:
        did_work = self.worker.step()
        is_unchanged = did_work and self._num_requests == self.worker.num_requests
        self._publish(has_status=not is_unchanged or time.monotonic() >= self._status_due)
        return did_work

    def _idle(self) -> None:
        self.worker.heartbeat()
        self._publish()

    def _count_remaining(self) -> None:
        self._publish()
        self._is_counted = True

    def _publish(self, *, has_status: bool = True) -> None:
        """Post everything new since the last step to the event loop, in one call."""
        status = self._new_status() if has_status else self._status
        tokens, changes = self.worker.answers.take_tokens(), self.worker.tiers.take_changes()
        if tokens or changes or status != self._status:
            self._status = status
            self._host.post(self._publish_now, tokens, status, changes)

    def _new_status(self) -> pb.Status:
        self._num_requests = self.worker.num_requests
        self._status_due = time.monotonic() + STATUS_S
        status = self.worker.status()
        status.replica = self._setup.replica
        status.draining = self.is_draining
        return status

    def _publish_now(self, tokens: Mapping[str, Any], status: pb.Status, changes: Mapping[bytes, Tier | None]) -> None:
        if self.is_draining and not status.draining:  # posted by the step thread before the drain
            status, posted = pb.Status(draining=True), status
            status.MergeFrom(posted)
        self._hub.publish(tokens, status)
        if changes and self._presence:
            self._presence.publish(changes)

    async def _snapshot(self) -> Mapping[bytes, Tier]:
        answer: asyncio.Future[Mapping[bytes, Tier]] = asyncio.get_running_loop().create_future()
        self.post(lambda: self._host.post(answer.set_result, self.worker.tiers.table.held()))
        return await answer


async def watch_ranks(addresses: Collection[str], identity: Identity) -> None:
    """Watch until a rank is unreachable, then raise ReplicaLost. Returns at once if there are no addresses.

    addresses: ranks 1 and up. identity: rank 0's.
    """
    if not addresses:
        return
    async with asyncio.TaskGroup() as group:
        for rank, address in enumerate(addresses, start=1):
            group.create_task(_watch(address, identity.rank(identity.name.replica, rank), identity))


async def _watch(address: str, peer: ProcessName, identity: Identity) -> None:
    """Watch one rank. Keepalive detects a frozen rank; a broken connection is reopened with the current certificate."""
    while True:
        tls_credentials = identity.tls_credentials
        async with open_channel(address, peer=peer, identity=identity) as channel:
            while identity.tls_credentials is tls_credentials:
                try:
                    async with asyncio.timeout(_RECONNECT_S):
                        await channel.channel_ready()
                except TimeoutError:
                    raise ReplicaLost(f"rank at {address} does not answer") from None
                await _until_broken(channel)


async def _until_broken(channel: aio.Channel) -> None:
    state = grpc.ChannelConnectivity.READY
    while state is grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
