"""A rank, put together once for both roles: its gang, its model, what moves its blocks, and on rank 0 what serves."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from grpc import aio

from cluster.index.membership import Member
from cluster.model import source as model_source
from cluster.process.background import BackgroundThread
from cluster.rpc import transfer_pb2 as pb
from cluster.rpc import transfer_pb2_grpc, worker_pb2_grpc
from cluster.wire.frames import FrameHub, WorkerServicer
from cluster.words.spec import Spec
from cluster.worker.gang_runner import GangRunner
from cluster.worker.inbox import Inbox
from cluster.worker.lower_tiers import loaded_to_report, open_tiers
from cluster.worker.peers import Peers, open_gang
from cluster.worker.rank_setup import RankSetup
from cluster.worker.replica_service import ReplicaService, RoleWorker
from cluster.worker.role_parts import LeaderParts, LiveReplica, RoleParts
from engine.config import EngineConfig
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import make_eviction
from engine.load import device_for, max_tokens_of, set_threads
from engine.parallel import TensorParallel
from engine.prompts import Prompt
from engine.runner import ModelRunner
from engine.tiers.orders import LoadResult
from engine.tiers.rank_tiers import RankTiers
from engine.tiers.tiers import Tiers
from kvtransfer.links.backends import backend_for
from kvtransfer.movers.grants import Grants
from kvtransfer.movers.link_config import LinkConfig
from kvtransfer.movers.pull_servicer import Granting, PullServicer
from kvtransfer.movers.rank_servicer import RankServicer
from kvtransfer.movers.receiver import Receiver
from kvtransfer.movers.sender import Sender
from kvtransfer.movers.wire_messages import part_to_report
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.passage import Shipment

W = TypeVar("W", bound=RoleWorker)


class RankBody(Generic[W]):
    """Rank 0 schedules and answers routers; every rank receives, computes and ships its own heads."""

    def __init__(self, role: RoleParts[W], spec: Spec) -> None:
        self.role = role
        self.device: torch.device = device_for(gpus=spec.pool(role.role).resources.gpus)
        self.service: ReplicaService | None = None  # on rank 0, once loaded
        self._hub = FrameHub()
        self._ranks = RankServicer()
        self._prefixes = PullServicer()
        self._following: BackgroundThread | None = None
        self._peers: Peers | None = None
        self._sender: Sender | None = None
        self._tiers: RankTiers | None = None

    def register(self, server: aio.Server) -> None:
        """Add the servicers, before anything is loaded."""
        transfer_pb2_grpc.add_RankServicer_to_server(self._ranks, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self._hub), server)
        worker_pb2_grpc.add_PrefixHolderServicer_to_server(self._prefixes, server)
        self.role.register(server)

    def load(self, setup: RankSetup) -> None:
        """Form the gang, load the weights, begin to serve. Raises ClusterError."""
        timeouts = setup.spec.timeouts
        setup.on_progress("meeting the other ranks", 0.0)
        self._peers, parallel = open_gang(
            self._ranks,
            setup.host,
            setup.addresses,
            rank=setup.rank,
            device=self.device,
            start_s=timeouts.start_s,
            ask_s=timeouts.handoff_s,
        )
        runner = self._load_model(setup, parallel)
        if setup.rank == 0:
            self._lead(setup, runner, self._peers)
        else:
            self._follow(setup, runner, self._peers)

    def run(self) -> None:
        """Return when this rank has been told to stop; raise what ended it otherwise."""
        running = self.service or self._following
        assert running, "load() comes first"
        running.run()

    async def close(self) -> None:
        """Close the connections to other ranks, on the event loop."""
        if self._sender:
            await self._sender.close()
        if self._tiers:
            await asyncio.to_thread(self._tiers.close)
        if self._peers:
            await self._peers.disconnect()

    def _load_model(self, setup: RankSetup, parallel: TensorParallel) -> ModelRunner:
        """This rank's share of the weights, and its KV pool. Returns when every rank has them."""
        spec, pool = setup.spec, setup.pool
        set_threads(pool.resources.cpus)
        setup.on_progress("finding the model", 0.05)
        config = EngineConfig(
            model_dir=model_source.resolve(spec.model.source),
            device=str(self.device),
            dtype=spec.model.dtype,
            weights=spec.model.weights,
            pool_dtype=spec.kv.pool_dtype,
            block_size=spec.kv.block_size,
            kv_memory_gib=pool.kv_memory_gib,
            deterministic=spec.engine.deterministic,
        )
        runner = ModelRunner(
            self.role.configure(config, spec),
            parallel,
            progress=lambda fraction: setup.on_progress("loading weights", 0.1 + 0.9 * fraction),
        )
        setup.on_progress("waiting for the other ranks", 1.0)
        parallel.wait_for_all("load", timeout_s=spec.timeouts.start_s)
        runner.warm_up(pool.max_batch_tokens)
        return runner

    def _follow(self, setup: RankSetup, runner: ModelRunner, peers: Peers) -> None:
        """Another rank than 0: do as rank 0 says, and tell it what comes and goes here."""

        def report(request: pb.ReportRequest) -> None:
            setup.host.spawn(peers.report(request))

        rank = setup.rank
        self._receive(setup, runner, lambda landing: report(part_to_report(landing, rank=rank)))
        gang = self._make_gang_runner(
            setup,
            runner,
            on_shipped=lambda shipment: report(part_to_report(shipment, rank=rank)),
            on_loaded=lambda loaded: report(loaded_to_report(loaded, rank=rank)),
        )
        self._following = BackgroundThread(gang.follow, name="following")
        self._following.start()

    def _lead(self, setup: RankSetup, runner: ModelRunner, peers: Peers) -> None:
        """Rank 0: begin to take requests."""
        spec, layout = setup.spec, runner.layout
        num_blocks, eviction = runner.pool.num_blocks, spec.kv.eviction
        blocks = BlockManager(num_blocks, make_eviction(eviction, num_blocks=num_blocks))
        inbox = Inbox(setup, peers)
        receiver = self._receive(setup, runner, functools.partial(inbox.landed, 0))
        gang = self._make_gang_runner(
            setup,
            runner,
            on_shipped=functools.partial(inbox.shipped, 0),
            on_loaded=functools.partial(inbox.loaded, 0),
        )
        tiers: Tiers[Prompt] = Tiers(blocks, gang.tiers, layout, eviction=eviction, timeout_s=spec.timeouts.transfer_s)
        grants = Grants(blocks, layout, tiers, probe=setup.probe)
        worker = self.role.make_worker(
            LeaderParts(
                setup=setup,
                gang=gang,
                receiver=receiver,
                blocks=blocks,
                limits=SchedulerConfig(
                    max_batch_tokens=setup.pool.max_batch_tokens,
                    max_running=setup.pool.max_running,
                    max_waiting=setup.pool.max_waiting,
                ),
                inbox=inbox,
                pulls=inbox.make_pulls(runner, receiver, blocks),
                grants=grants,
                tiers=tiers,
            )
        )
        self.service = ReplicaService(worker, setup.host, self._hub, replica=setup.replica)
        inbox.open(worker, self.service.post)
        replica = LiveReplica(
            service=self.service,
            worker=worker,
            peers=peers,
            model=layout.model,
            block_size=layout.block_size,
            max_tokens=max_tokens_of(runner, limit=spec.model.max_context),
        )
        self.role.serve(replica)
        self._prefixes.granting = Granting(grants, self.service.post)
        self._ranks.on_report = inbox.reported
        self.service.start(
            index_url=setup.index_url,
            name=spec.name,
            member=_member(setup, runner, max_tokens=replica.max_tokens),
            other_ranks=setup.addresses[1:],
        )

    def _make_gang_runner(
        self,
        setup: RankSetup,
        runner: ModelRunner,
        *,
        on_shipped: Callable[[Shipment], None],
        on_loaded: Callable[[LoadResult], None],
    ) -> GangRunner:
        self._sender = Sender(
            _link_config(setup, runner),
            name=f"{setup.replica}/{setup.rank}",
            loop=setup.host.loop,
            on_shipped=on_shipped,
        )
        self._tiers = open_tiers(setup, runner, on_loaded)
        return GangRunner(runner, self._sender, self._tiers, probe=setup.probe)

    def _receive(self, setup: RankSetup, runner: ModelRunner, on_landed: Callable[[Landing], None]) -> Receiver:
        """Serve senders elsewhere from now on."""
        config, meeting = _link_config(setup, runner), self._ranks.meeting
        self._ranks.receiver = Receiver(config, meeting=meeting, on_landed=on_landed)
        return self._ranks.receiver


def _link_config(setup: RankSetup, runner: ModelRunner) -> LinkConfig:
    return LinkConfig(
        rank=setup.rank,
        pool=runner.pool,
        wire_dtype=setup.spec.kv.wire_dtype,
        backend=backend_for(runner.device, host_link=setup.spec.kv.host_link),
        host=setup.host.host,
        timeout_s=setup.spec.timeouts.transfer_s,
        probe=setup.probe,
    )


def _member(setup: RankSetup, runner: ModelRunner, *, max_tokens: int) -> Member:
    layout = runner.layout
    return Member(
        replica=setup.replica,
        role=setup.role,
        address=setup.addresses[0],
        layout=layout.fingerprint,
        num_blocks=runner.pool.num_blocks,
        block_size=layout.block_size,
        bytes_per_token=layout.bytes_per_token() * layout.tensor_parallel,
        max_tokens=max_tokens,
        max_running=setup.pool.max_running,
        max_batch_tokens=setup.pool.max_batch_tokens,
    )
