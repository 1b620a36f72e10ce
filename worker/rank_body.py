"""Assembly of a rank for both roles: gang, model, KV transfer, and on rank 0 the service."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable

import torch
from grpc import aio

from core.grammar.compiler import GrammarCompiler
from core.identity.deployment_secrets import Purpose
from core.index.membership import Member
from core.model import source as model_source
from core.model.draft_heads import HeadsPlace
from core.model.draft_source import fetch_for_a_switch, heads_source
from core.process.background import BackgroundThread
from core.rpc import transfer_pb2_grpc, worker_pb2_grpc
from core.spec.schema import Spec
from core.types.errors import ReplicaFailed
from core.types.network import check_link, is_loopback
from core.types.role_switch import largest_step
from core.wire.frames import FrameHub
from engine.config import EngineConfig, device_for
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import make_eviction
from engine.runner.parallel import TensorParallel
from engine.runner.runner import ModelRunner
from engine.tiers.rank_tiers import RankTiers
from engine.tiers.tiers import Tiers
from kvtransfer.links.backends import backend_for, device_bytes
from kvtransfer.links.interface import guide_nccl
from kvtransfer.links.link import LinkGuard
from kvtransfer.transfer.fetch_servicer import FetchServicer, FetchServing
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.rank_servicer import RankServicer
from kvtransfer.transfer.receiver import Receiver
from kvtransfer.transfer.sender import Sender
from kvtransfer.transfer.serve_fetches import ServedFetches
from kvtransfer.transfer.step_count import StepCount
from kvtransfer.transfer.wire_messages import Part, part_to_report
from worker.gang_runner import GangRunner
from worker.grammars import Grammars
from worker.handover_state import HandoverState, LeaderHandoverState
from worker.rank_group import OtherRanks, open_gang
from worker.rank_setup import RankSetup
from worker.replica_service import ReplicaService
from worker.role_parts import LeaderParts, LiveReplica, RoleParts
from worker.step_inbox import Inbox
from worker.tier_setup import open_tiers
from worker.worker import EngineParts


class RankBody:
    """One rank. Rank 0 schedules and answers routers; every rank receives, computes and ships its own heads.

    The servicers answer from `register` on, before the model is loaded. `load` sets their empty slots: `live` of the
    role's servicer, `fetch_serving`, `receiver`, `on_report`, `service`, and the arguments of `Inbox.open`.
    """

    def __init__(self, role: RoleParts, spec: Spec) -> None:
        self.role = role
        self.device: torch.device = device_for(gpus=spec.pool(role.role).resources.gpus)
        self.service: ReplicaService | None = None  # on rank 0, once loaded
        self._hub = FrameHub()
        self._steps = StepCount()
        self._ranks = RankServicer(self._steps)
        self._prefixes = FetchServicer()
        self._following: BackgroundThread | None = None
        self._others: OtherRanks | None = None
        self._sender: Sender | None = None
        self._tiers: RankTiers | None = None
        self._inbox: Inbox | None = None
        self._grammars: Grammars | None = None
        self._loaded: tuple[RankSetup, ModelRunner] | None = None
        self._parts: EngineParts | None = None  # on rank 0

    def register(self, server: aio.Server) -> None:
        """Add the servicers, before anything is loaded."""
        transfer_pb2_grpc.add_RankServicer_to_server(self._ranks, server)
        worker_pb2_grpc.add_PrefixFetchServicer_to_server(self._prefixes, server)
        self.role.add_servicer(self.role.servicer, server)

    def load(self, setup: RankSetup, handover_state: HandoverState | None = None) -> None:
        """Form the gang, load the weights and start serving. Raises ClusterError.

        A handover state provides the gang, the weights and the blocks.
        """
        if handover_state:
            self._others, runner = self._reconnect(setup), handover_state.runner
        else:
            self._others, parallel = self._join_gang(setup)
            runner = self._load_model(setup, parallel)
        self._loaded = setup, runner
        if setup.rank == 0:
            self._lead(setup, runner, self._others, handover_state)
        else:
            self._follow(setup, runner, self._others, handover_state)

    def hand_over(self, *, within_s: float) -> HandoverState:
        """Stop a drained replica and return its state for a successor in this process.

        The caller closes the connections. Blocks for up to `within_s`; raises ReplicaFailed on timeout.
        """
        assert self._loaded, "call load() first"
        self._prefixes.fetch_serving = None  # reject new fetches, which nothing would serve
        setup, runner = self._loaded
        leader = None
        if self.service:
            assert self._parts and self._grammars
            self.service.end_whole(within_s=within_s)
            leader = LeaderHandoverState(blocks=self._parts.blocks, tiers=self._parts.tiers, grammars=self._grammars)
        elif self._following:
            self._following.join(within_s)  # rank 0 sends stop
            if self._following.is_running or self._following.failure:
                raise ReplicaFailed(f"rank {setup.rank} did not stop following rank 0 within {within_s} s, or failed")
        receiver, self._ranks.receiver = self._ranks.receiver, None
        if receiver:
            receiver.close_all()
        runner.rest(None)  # the successor configures the draft heads again
        handover_state = HandoverState(
            spec=setup.spec, role=setup.role, runner=runner, tiers=self._tiers, leader=leader
        )
        self._tiers = self._grammars = None  # owned by the successor, so close() must not close them
        return handover_state

    def run(self) -> None:
        """Block until this rank is stopped. Raises the error that ended it otherwise."""
        running = self.service or self._following
        assert running, "call load() first"
        running.run()

    async def close(self) -> None:
        """Close the connections to other ranks. Runs on the event loop."""
        if self._sender:
            await self._sender.close()
        if self._tiers:
            await asyncio.to_thread(self._tiers.close)
        if self._inbox:
            await self._inbox.close()
        if self._grammars:
            self._grammars.close()
        if self._others:
            await self._others.disconnect()

    def _join_gang(self, setup: RankSetup) -> tuple[OtherRanks, TensorParallel]:
        timeouts = setup.spec.timeouts
        if self.device.type == "cuda":
            gpus = setup.spec.pool(self.role.role).resources.gpus
            own_name = f"{setup.host.host}/{os.getpid()}" if gpus < 1 else ""
            guide_nccl(os.environ, host=setup.host.host, rank_on_shared_gpu=own_name)
        setup.on_progress("connecting to the other ranks", 0.0)
        return open_gang(
            self._ranks,
            setup.host,
            setup.addresses,
            rank=setup.rank,
            steps=self._steps,
            device=self.device,
            start_s=timeouts.start_s,
            ask_s=timeouts.handoff_s,
        )

    def _reconnect(self, setup: RankSetup) -> OtherRanks:
        """Connect to the other ranks under their new names and addresses. The process group is kept."""
        timeouts = setup.spec.timeouts
        connecting = OtherRanks.connect(
            setup.addresses, identity=setup.host.identity, steps=self._steps, timeout_s=timeouts.handoff_s
        )
        return setup.host.call(connecting, timeout_s=timeouts.start_s)

    def _load_model(self, setup: RankSetup, parallel: TensorParallel) -> ModelRunner:
        """Load this rank's shard of the weights and allocate its KV pool. Returns when every rank is loaded."""
        spec, pool = setup.spec, setup.pool
        max_batch_tokens, max_running = largest_step(spec, setup.role)
        torch.set_num_threads(max(1, int(pool.resources.cpus)))
        setup.on_progress("resolving the model", 0.05)
        heads = heads_source(spec)
        if setup.rank == 0:
            fetch_for_a_switch(spec, setup.role)
        config = EngineConfig(
            model_dir=model_source.resolve(spec.model.source),
            device=str(self.device),
            dtype=spec.model.dtype,
            weights=spec.model.weights,
            pool_dtype=spec.kv.pool_dtype,
            block_size=spec.kv.block_size,
            kv_memory_gib=pool.kv_memory_gib,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_context=spec.model.max_context,
            link_bytes=_link_bytes(setup, self.device),
            deterministic=spec.engine.deterministic,
            heads=HeadsPlace(heads.heads, heads.directory) if heads and heads.heads else None,
        )

        def is_loaded() -> None:
            if pool.tensor_parallel > 1:
                setup.on_progress("waiting for the other ranks", 1.0)
            parallel.wait_for_all("load", timeout_s=spec.timeouts.start_s)
            setup.on_progress("running the largest batch", 1.0)

        runner = ModelRunner(
            self.role.configure(config, spec),
            parallel,
            progress=lambda fraction: setup.on_progress("loading weights", 0.1 + 0.9 * fraction),
            is_loaded=is_loaded,
        )
        parallel.wait_for_all("pool", timeout_s=spec.timeouts.start_s)
        # Kernel selection may compile for minutes on one rank. Without this barrier the others would wait for it in a
        # collective.
        runner.warm_up(
            max_batch_tokens, on_chosen=lambda: parallel.wait_for_all("kernels", timeout_s=spec.timeouts.start_s)
        )
        return runner

    def _follow(
        self, setup: RankSetup, runner: ModelRunner, others: OtherRanks, handover_state: HandoverState | None
    ) -> None:
        """Follow rank 0 and report transfers and loads to it. For ranks other than 0."""

        def report(part: Part) -> None:
            setup.host.spawn(others.report(part_to_report(part, rank=setup.rank)))

        _, gang = self._connect(setup, runner, report, handover_state)
        self._following = BackgroundThread(gang.follow, name="following")
        self._following.start()

    def _lead(
        self, setup: RankSetup, runner: ModelRunner, others: OtherRanks, handover_state: HandoverState | None
    ) -> None:
        """Start taking requests, on rank 0."""
        inbox = self._inbox = Inbox(setup, others)
        receiver, gang = self._connect(setup, runner, functools.partial(inbox.on_part, 0), handover_state)
        inherited = handover_state.leader if handover_state else None
        parts = _leader_parts(setup, gang, receiver, inbox, inherited)
        self._parts = parts.engine
        worker = self.role.make_worker(parts)
        self.service = ReplicaService(worker, setup.host, self._hub, replica=setup.replica)
        inbox.open(worker, self.service.post)
        self._grammars = inherited.grammars if inherited else _open_grammars(setup, runner)
        live = LiveReplica(
            service=self.service,
            worker=worker,
            others=others,
            layout=runner.layout,
            vocab_size=runner.config.vocab_size,
            grammars=self._grammars,
            max_tokens=min(runner.max_tokens, setup.spec.model.max_context or runner.max_tokens),
        )
        self.role.servicer.live = live
        self._prefixes.fetch_serving = FetchServing(parts.engine.served_fetches, runner.layout, self.service.post)
        self._ranks.on_report = inbox.on_report
        credentials = setup.launch.credentials
        self.service.start(
            index_url=credentials.index_url,
            name=setup.spec.name,
            key=credentials.key(Purpose.MEMBERS),
            member=_member(setup, runner, setup.host.serve_frames(self._hub), max_tokens=live.max_tokens),
            other_ranks=setup.addresses[1:],
            model=setup.spec.model.name,
            metrics_host=_metrics_host(setup),
        )

    def _connect(
        self,
        setup: RankSetup,
        runner: ModelRunner,
        on_part: Callable[[Part], None],
        handover_state: HandoverState | None,
    ) -> tuple[Receiver, GangRunner]:
        """Create the receiver, the sender and the lower tiers. `on_part` is called with their results."""
        backend = backend_for(runner.device, host_link=setup.spec.kv.host_link)
        check_link(backend, setup.host.host, trust_network=setup.spec.kv.trust_network)
        config = LinkConfig(
            rank=setup.rank,
            identity=setup.host.identity,
            pool=runner.pool,
            wire_dtype=setup.spec.kv.wire_dtype,
            backend=backend,
            host=setup.host.host,
            timeout_s=setup.spec.timeouts.transfer_s,
            guard=LinkGuard(setup.launch.credentials.key(Purpose.LINKS), is_encrypted=setup.spec.kv.encrypt),
            failpoint=setup.failpoint,
        )
        config.codec.warm_up(runner.device)
        receiver = self._ranks.receiver = Receiver(config, rendezvous=self._ranks.rendezvous, on_landed=on_part)
        self._sender = Sender(config, loop=setup.host.loop, on_shipped=on_part)
        if handover_state:
            self._tiers = handover_state.tiers
            if self._tiers:
                self._tiers.on_loaded = on_part
            runner.parallel.least(0)  # barrier
        else:
            self._tiers = open_tiers(setup, runner, on_part)
        return receiver, GangRunner(runner, self._sender, self._tiers, steps=self._steps, failpoint=setup.failpoint)


def _link_bytes(setup: RankSetup, device: torch.device) -> int:
    """Return the device memory in bytes for links to and from every other replica that the spec allows."""
    backend = backend_for(device, host_link=setup.spec.kv.host_link)
    return 2 * num_link_peers(setup.spec, setup.pool.tensor_parallel) * device_bytes(backend)


def num_link_peers(spec: Spec, tensor_parallel: int) -> int:
    """Return the number of ranks of other replicas that one rank may link to.

    Counts, per replica, the ranks that share heads with it. With an autoscaler, counts its maximum number of replicas;
    `cluster scale` may exceed this.
    """
    bounds = (spec.autoscale.prefill.max, spec.autoscale.decode.max) if spec.autoscale else (0, 0)
    pools = zip((spec.prefill, spec.decode), bounds, strict=True)
    of_each = ((max(pool.replicas, most), -(-pool.tensor_parallel // tensor_parallel)) for pool, most in pools)
    return max(0, sum(replicas * ranks for replicas, ranks in of_each) - 1)


def _open_grammars(setup: RankSetup, runner: ModelRunner) -> Grammars:
    model_dir = model_source.resolve(setup.spec.model.source)
    return Grammars(GrammarCompiler(model_dir, vocab_size=runner.config.vocab_size))


def _leader_parts(
    setup: RankSetup, gang: GangRunner, receiver: Receiver, inbox: Inbox, inherited: LeaderHandoverState | None
) -> LeaderParts:
    spec, pool, layout = setup.spec, setup.pool, gang.runner.layout
    if inherited:
        blocks, tiers = inherited.blocks, inherited.tiers
    else:
        num_blocks, eviction = gang.runner.pool.num_blocks, spec.kv.eviction
        blocks = BlockManager(num_blocks, make_eviction(eviction, num_blocks=num_blocks))
        tiers = Tiers(blocks, gang.tiers, layout, eviction=eviction, timeout_s=spec.timeouts.transfer_s)
    engine = EngineParts(
        gang=gang,
        blocks=blocks,
        limits=SchedulerConfig(
            max_batch_tokens=pool.max_batch_tokens,
            max_running=pool.max_running,
            max_waiting=pool.max_waiting,
            max_local_decodes=int(pool.local_decode_share * pool.max_running),
            max_local_decode_blocks=int(pool.local_decode_share * blocks.num_blocks),
        ),
        prefix_fetches=inbox.make_fetches(layout, receiver, blocks),
        served_fetches=ServedFetches(blocks, layout, tiers, failpoint=setup.failpoint),
        tiers=tiers,
    )
    return LeaderParts(setup=setup, receiver=receiver, inbox=inbox, engine=engine)


def _metrics_host(setup: RankSetup) -> str:
    """Loopback as long as the routers' admin listeners are there, else the address of this node."""
    admin_host = setup.spec.router.admin_host
    return admin_host if is_loopback(admin_host) else setup.host.host


def _member(setup: RankSetup, runner: ModelRunner, frames_address: str, *, max_tokens: int) -> Member:
    layout = runner.layout
    return Member(
        replica=setup.replica,
        role=setup.role,
        address=setup.addresses[0],
        frames_address=frames_address,
        layout=layout.fingerprint,
        num_blocks=runner.pool.num_blocks,
        block_size=layout.block_size,
        bytes_per_token=layout.bytes_per_token() * layout.tensor_parallel,
        max_tokens=max_tokens,
        max_running=setup.pool.max_running,
        max_batch_tokens=setup.pool.max_batch_tokens,
        local_decode_share=setup.pool.local_decode_share,
        answers_overflow=setup.pool.answers_overflow,
    )
