"""A rank of a decode replica: how its parts are put together."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from cluster.worker.tier_parts import LoadedPart, open_tiers
from grpc import aio
from kvtransfer.movers.peers import Peers

from cluster.index.membership import Member
from cluster.process.background import BackgroundThread
from cluster.rpc import transfer_pb2_grpc, worker_pb2_grpc
from cluster.wire.frames import FrameHub, WorkerServicer
from cluster.words.request import Role, SequenceRequest
from cluster.worker import rank_parts
from cluster.worker.gang_runner import GangRunner
from cluster.worker.inbox import Inbox
from cluster.worker.rank_process import RankProcess, Setup
from cluster.worker.replica_service import ReplicaService
from decode_worker.server import DecodeServicer, Serving
from decode_worker.worker import DecodeWorker
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import make_eviction
from engine.load import device_for, max_tokens_of
from engine.prompts import Prompt
from engine.runner import ModelRunner
from engine.sequence import Sequence
from engine.tiers.orders import LoadResult
from engine.tiers.rank_tiers import RankTiers
from engine.tiers.tiers import Tiers
from kvtransfer.movers.grants import Grants
from kvtransfer.movers.pull_servicer import Granting, PullServicer
from kvtransfer.movers.rank_servicer import RankServicer
from kvtransfer.movers.sender import Sender
from kvtransfer.protocol.passage import Shipment


def make_rank(spec: dict[str, Any], **arguments: Any) -> RankProcess:
    """What the controller starts: one rank of a decode replica."""
    return RankProcess(spec, body=DecodeBody(spec), **arguments)


class DecodeBody:
    """Rank 0 schedules and answers routers; every rank receives its own heads and computes."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._device = device_for(gpus=spec["decode"]["resources"]["gpus"])
        self.device = str(self._device)
        self.service: ReplicaService | None = None
        self._hub = FrameHub()
        self._ranks = RankServicer()
        self._requests = DecodeServicer()
        self._prefixes = PullServicer()
        self._following: BackgroundThread | None = None
        self._peers: Peers | None = None
        self._sender: Sender | None = None
        self._tiers: RankTiers | None = None

    def register(self, server: aio.Server) -> None:
        transfer_pb2_grpc.add_RankServicer_to_server(self._ranks, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self._hub), server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self._requests, server)
        worker_pb2_grpc.add_PrefixHolderServicer_to_server(self._prefixes, server)

    def load(self, setup: Setup) -> int:
        pool = setup.spec.decode
        self._peers, parallel = rank_parts.meet(setup, self._ranks, device=self._device)
        runner = rank_parts.load(
            setup,
            pool,
            parallel,
            device=self._device,
            expert_parallel=pool.expert_parallel,
            redundant_experts=pool.redundant_experts,
            replayed_rows=pool.max_running,
        )
        if setup.rank == 0:
            self._serve(setup, runner, self._peers)
        else:
            report = functools.partial(rank_parts.report, setup, self._peers)
            rank_parts.make_receiver(setup, runner, self._ranks, report)
            tiers = self._open_tiers(setup, runner, lambda loaded: report(LoadedPart(loaded)))
            rank = GangRunner(runner, self._make_sender(setup, runner, report), tiers)
            self._following = BackgroundThread(rank.follow, name="following")
            self._following.start()
        return runner.pool.num_blocks

    def run(self) -> None:
        running = self.service or self._following
        assert running, "load() comes first"
        running.run()

    async def close(self) -> None:
        if self._sender:
            await self._sender.close()
        if self._tiers:
            await asyncio.to_thread(self._tiers.close)
        if self._peers:
            await self._peers.disconnect()

    def _make_sender(self, setup: Setup, runner: ModelRunner, on_shipped: Callable[[Shipment], None]) -> Sender:
        self._sender = rank_parts.make_sender(setup, runner, on_shipped)
        return self._sender

    def _open_tiers(
        self, setup: Setup, runner: ModelRunner, on_loaded: Callable[[LoadResult], None]
    ) -> RankTiers | None:
        self._tiers = open_tiers(setup, Role.DECODE, runner, on_loaded)
        return self._tiers

    def _serve(self, setup: Setup, runner: ModelRunner, peers: Peers) -> None:
        """Rank 0: begin to take requests."""
        pool, layout = setup.spec.decode, runner.layout
        num_blocks, eviction = runner.pool.num_blocks, setup.spec.kv.eviction
        blocks = BlockManager(num_blocks, make_eviction(eviction, num_blocks=num_blocks))
        config = SchedulerConfig(
            max_batch_tokens=pool.max_batch_tokens,
            max_running=pool.max_running,
            max_waiting=pool.max_waiting,
        )
        inbox = Inbox(setup, peers)
        receiver = rank_parts.make_receiver(setup, runner, self._ranks, functools.partial(inbox.landed, 0))
        rank_tiers = self._open_tiers(setup, runner, functools.partial(inbox.loaded, 0))
        tiers: Tiers[Prompt] = Tiers(
            blocks, rank_tiers, layout, eviction=eviction, timeout_s=setup.spec.timeouts.transfer_s
        )
        grants = Grants(blocks, layout, tiers)
        worker = DecodeWorker(
            GangRunner(runner, self._make_sender(setup, runner, functools.partial(inbox.shipped, 0)), rank_tiers),
            receiver,
            blocks,
            config,
            replica=setup.replica,
            addresses=setup.addresses,
            handoff_s=setup.spec.timeouts.handoff_s,
            close_handoff=inbox.close_handoff,
            pulls=inbox.make_pulls(runner, receiver, blocks),
            grants=grants,
            tiers=tiers,
        )
        self.service = ReplicaService(worker, setup.host, self._hub, replica=setup.replica)
        inbox.open(worker, self.service.post)
        max_tokens = max_tokens_of(runner, limit=setup.spec.model.max_context)

        def sequence_of(request: SequenceRequest) -> Sequence:
            # After a migration, what runs here may be any of the client's choices.
            first = request.choices[0]
            return Sequence(request, first, model=layout.model, block_size=layout.block_size, max_context=max_tokens)

        self._requests.serving = Serving(self.service, worker, peers, sequence_of)
        self._prefixes.granting = Granting(grants, self.service.post)
        self._ranks.on_report = inbox.reported
        member = Member(
            replica=setup.replica,
            role=Role.DECODE,
            address=setup.addresses[0],
            layout=layout.fingerprint,
            num_blocks=runner.pool.num_blocks,
            block_size=layout.block_size,
            bytes_per_token=layout.bytes_per_token() * layout.tensor_parallel,
            max_tokens=max_tokens,
            max_running=pool.max_running,
            max_batch_tokens=pool.max_batch_tokens,
        )
        self.service.start(
            index_url=setup.index_url, name=setup.spec.name, member=member, other_ranks=setup.addresses[1:]
        )
