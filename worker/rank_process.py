"""Process of one rank of any role: its gang, model and KV transfer, and on rank 0 the service."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from functools import partial

from grpc import aio

from core.grammar.compiler import GrammarCompiler
from core.identity.credentials import Identity
from core.identity.deployment_secrets import Purpose
from core.index.membership import Member
from core.model import source as model_source
from core.process.background import BackgroundThread
from core.process.stopwatch import Stopwatch
from core.rpc import transfer_pb2_grpc, worker_pb2_grpc
from core.types.errors import ReplicaFailed
from core.types.failpoint import Failpoint, unobserved
from core.types.launch import Launch
from core.types.network import check_link
from core.types.rank_api import Binding, Progress, RankStatus
from core.types.role_switch import largest_step
from core.wire.frames import FrameHub
from core.wire.rank_server import RankHost
from engine.config import device_for
from engine.engine import SchedulerConfig
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import make_eviction
from engine.kv.pool import window_manager_of
from engine.runner.parallel import TensorParallel
from engine.runner.runner import ModelRunner
from engine.tiers.rank_tiers import RankTiers
from engine.tiers.tiers import Tiers
from kvtransfer.links.backends import backend_for
from kvtransfer.links.link import LinkGuard
from kvtransfer.links.nccl_library import guide_nccl
from kvtransfer.transfer.link_config import LinkConfig
from kvtransfer.transfer.rank_servicer import RankServicer, StepCount
from kvtransfer.transfer.receiver import Receiver
from kvtransfer.transfer.sender import Sender
from kvtransfer.transfer.serve_fetches import FetchServicer, ServedFetches
from kvtransfer.transfer.wire_messages import Part, part_to_report
from worker.gang_runner import GangRunner
from worker.grammars import Grammars
from worker.rank_group import OtherRanks, connect, open_gang
from worker.rank_setup import HandoverState, LeaderHandoverState, RankSetup, load_model, open_tiers
from worker.replica_service import ReplicaService
from worker.role_parts import LeaderParts, RoleParts
from worker.worker import EngineParts

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
_HAND_OVER_S = 10.0  # one step, and closing the last handoffs; usually milliseconds


class RankProcess:
    """Implements core.types.rank_api.Rank.

    Rank 0 schedules and answers routers; every rank receives, computes and ships its own heads. The servicers answer
    from `bind` on, before the model is loaded. `load` sets their empty slots: `service` of the role's servicer,
    `served_fetches`, `receiver` and `on_report`.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        role: RoleParts,
        identity: Identity,
        host: str | None = None,
        failpoint: Failpoint = unobserved,
    ) -> None:
        """host: address to listen on; None: the node's address in Ray."""
        self._spec = launch.spec
        self._role = role
        self._new_setup = partial(
            RankSetup, launch=launch, role=role.role, on_progress=self._note_progress, failpoint=failpoint
        )
        self._device = device_for(gpus=launch.spec.pool(role.role).resources.gpus)
        self._address = host
        self._identity = identity
        self._host: RankHost | None = None
        self._binding: Binding | None = None
        self._watch = Stopwatch()
        self._progress: Progress = {"stage": "starting", "fraction": 0.0}
        self._hub = FrameHub()
        self._steps = StepCount()
        self._ranks = RankServicer(self._steps)
        self._prefixes = FetchServicer()
        self._handover_state: HandoverState | None = None  # of this process's previous rank, until `load`
        self._loaded: tuple[RankSetup, ModelRunner] | None = None
        self._others: OtherRanks | None = None
        self._sender: Sender | None = None
        self._tiers: RankTiers | None = None
        self._following: BackgroundThread | None = None  # on ranks other than 0
        self._service: ReplicaService | None = None  # on rank 0, once loaded
        self._grammars: Grammars | None = None  # on rank 0
        self._parts: EngineParts | None = None  # on rank 0

    def bind(self) -> Binding:
        if self._binding is None:
            self._host = RankHost(self._address or _address_of_node(), self._identity)
            self._binding = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "address": self._host.serve(self._register),
                "device": str(self._device),
            }
        return self._binding

    def load(self, addresses: list[str]) -> None:
        assert self._host, "call bind() first"
        self._watch = Stopwatch()
        setup, handover_state = self._new_setup(addresses=addresses, host=self._host), self._handover_state
        if handover_state:  # the process group is kept; the other ranks have new names and addresses
            start_s, ask_s = setup.spec.timeouts.start_s, setup.spec.timeouts.handoff_s
            self._others = connect(setup.host, addresses, steps=self._steps, start_s=start_s, ask_s=ask_s)
            runner = handover_state.runner
        else:
            self._others, parallel = self._join_gang(setup)
            runner = load_model(setup, parallel, self._device, self._role.configure)
        self._loaded = setup, runner
        if setup.rank == 0:
            self._lead(setup, runner, self._others, handover_state)
        else:
            self._follow(setup, runner, self._others, handover_state)
        self._handover_state = None
        self._note_progress("serving", 1.0)
        logger.info("loaded: %s", self._watch)

    def progress(self) -> Progress:
        return self._progress

    def run_forever(self) -> None:
        running = self._service or self._following
        assert running, "call load() first"
        running.run()

    def status(self) -> RankStatus:
        if self._service:
            return self._service.status()
        return {"state": "loading", "running": 0, "waiting": 0, "blocks": {"total": 0, "free": 0, "cached": 0}}

    def drain(self) -> None:
        if self._service:
            self._service.drain()

    def succeed(self, before: RankProcess) -> None:
        handover_state = before.hand_over()
        handover_state.check(self._spec, self._role.role)
        self._handover_state = handover_state

    def hand_over(self) -> HandoverState:
        """End this drained rank and return its state for a successor. Raises ReplicaFailed.

        After return the rank rejects all calls. Its connections, which no longer touch blocks, are closed in the
        background, because peers may be slow.
        """
        assert self._loaded, "call load() first"
        self._prefixes.served_fetches = None  # reject new fetches, which nothing would serve
        setup, runner = self._loaded
        leader = None
        if self._service:
            assert self._parts and self._grammars
            self._service.end_whole(within_s=_HAND_OVER_S)
            leader = LeaderHandoverState(blocks=self._parts.blocks, tiers=self._parts.tiers, grammars=self._grammars)
        elif self._following:
            self._following.join(_HAND_OVER_S)  # rank 0 sends stop
            if self._following.is_running or self._following.failure:
                raise ReplicaFailed(
                    f"rank {setup.rank} did not stop following rank 0 within {_HAND_OVER_S} s, or failed"
                )
        receiver, self._ranks.receiver = self._ranks.receiver, None
        if receiver:
            receiver.close_all()
        runner.rest(None)  # the successor configures the draft heads again
        handover_state = HandoverState(
            spec=setup.spec, role=setup.role, runner=runner, tiers=self._tiers, leader=leader
        )
        self._tiers = self._grammars = None  # owned by the successor, so _disconnect() must not close them
        BackgroundThread(self._close, name="closing").start()
        return handover_state

    def stop(self) -> None:
        if self._service:
            self._service.stop()
        self._close()

    def _close(self) -> None:
        if self._host:
            self._host.call(self._disconnect(), timeout_s=_CLOSE_S)
            self._host.stop()

    async def _disconnect(self) -> None:
        """Close the connections to other ranks. Runs on the event loop."""
        if self._sender:
            await self._sender.close()
        if self._tiers:
            await asyncio.to_thread(self._tiers.close)
        if self._service:
            await self._service.close()
        if self._grammars:
            self._grammars.close()
        if self._others:
            await self._others.disconnect()

    def _note_progress(self, stage: str, fraction: float) -> None:
        self._watch.lap(self._progress["stage"])
        self._progress = {"stage": stage, "fraction": fraction}

    def _register(self, server: aio.Server) -> None:
        transfer_pb2_grpc.add_RankServicer_to_server(self._ranks, server)
        worker_pb2_grpc.add_PrefixFetchServicer_to_server(self._prefixes, server)
        self._role.servicer.register(server)

    def _join_gang(self, setup: RankSetup) -> tuple[OtherRanks, TensorParallel]:
        timeouts = setup.spec.timeouts
        if self._device.type == "cuda":
            gpus = setup.spec.pool(self._role.role).resources.gpus
            own_name = f"{setup.host.host}/{os.getpid()}" if gpus < 1 else ""
            guide_nccl(os.environ, host=setup.host.host, rank_on_shared_gpu=own_name)
        setup.on_progress("connecting to the other ranks", 0.0)
        return open_gang(
            self._ranks,
            setup.host,
            setup.addresses,
            rank=setup.rank,
            steps=self._steps,
            device=self._device,
            start_s=timeouts.start_s,
            ask_s=timeouts.handoff_s,
        )

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
        service = ReplicaService(setup, others, self._hub)
        receiver, gang = self._connect(setup, runner, partial(service.on_part, 0), handover_state)
        inherited = handover_state.leader if handover_state else None
        parts = _leader_parts(setup, gang, receiver, service, inherited)
        self._parts = parts.engine
        self._grammars = inherited.grammars if inherited else _open_grammars(setup, runner)
        service.open(
            self._role.make_worker(parts),
            runner.layout,
            self._grammars,
            vocab_size=runner.config.vocab_size,
            max_tokens=min(runner.max_tokens, setup.spec.model.max_context or runner.max_tokens),
        )
        self._service = self._role.servicer.service = service
        self._prefixes.post, self._prefixes.served_fetches = service.post, parts.engine.served_fetches
        self._ranks.on_report = service.on_report
        frames_address = setup.host.serve_frames(self._hub)
        service.start(_member(setup, runner, frames_address, max_tokens=service.max_tokens))

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


def _open_grammars(setup: RankSetup, runner: ModelRunner) -> Grammars:
    model_dir = model_source.resolve(setup.spec.model.source)
    return Grammars(GrammarCompiler(model_dir, vocab_size=runner.config.vocab_size))


def _leader_parts(
    setup: RankSetup,
    gang: GangRunner,
    receiver: Receiver,
    service: ReplicaService,
    inherited: LeaderHandoverState | None,
) -> LeaderParts:
    spec, pool, layout = setup.spec, setup.pool, gang.runner.layout
    if inherited:
        blocks, tiers = inherited.blocks, inherited.tiers
    else:
        num_blocks, eviction = gang.runner.pool.num_blocks, spec.kv.eviction
        num_states = gang.runner.pool.num_states
        windows = window_manager_of(gang.runner.pool, max_batch_tokens=largest_step(spec, setup.role)[0])
        blocks = BlockManager(
            num_blocks, make_eviction(eviction, num_blocks=num_blocks), num_states=num_states, windows=windows
        )
        if blocks.states:
            blocks.states.checkpoint_every(spec.kv.checkpoint_tokens, block_size=spec.kv.block_size)
        tiers = Tiers(blocks, gang.tiers, layout, eviction=eviction, timeout_s=spec.timeouts.transfer_s)
    engine = EngineParts(
        gang=gang,
        blocks=blocks,
        limits=SchedulerConfig(
            # After a role switch, a step must not have more tokens than the pool's parts were reserved for.
            max_batch_tokens=min(pool.max_batch_tokens, blocks.windows.max_batch_tokens)
            if blocks.windows
            else pool.max_batch_tokens,
            max_running=_max_running(setup, gang.runner),
            max_waiting=pool.max_waiting,
            max_local_decodes=int(pool.local_decode_share * _max_running(setup, gang.runner)),
            max_local_decode_blocks=int(pool.local_decode_share * blocks.num_blocks),
        ),
        prefix_fetches=service.make_fetches(layout, receiver, blocks),
        served_fetches=ServedFetches(blocks, layout, tiers, failpoint=setup.failpoint),
        tiers=tiers,
    )
    return LeaderParts(setup=setup, receiver=receiver, service=service, engine=engine)


def _member(setup: RankSetup, runner: ModelRunner, frames_address: str, *, max_tokens: int) -> Member:
    layout, pool = runner.layout, runner.pool
    cache = layout.cache.of_ranks(layout.tensor_parallel)
    return Member(
        replica=setup.replica,
        role=setup.role,
        address=setup.addresses[0],
        frames_address=frames_address,
        layout=layout.fingerprint,
        num_blocks=pool.num_blocks,
        block_size=layout.block_size,
        bytes_per_token=cache.token_bytes,
        max_tokens=max_tokens,
        max_running=_max_running(setup, runner),
        max_batch_tokens=setup.pool.max_batch_tokens,
        local_decode_share=setup.pool.local_decode_share,
        answers_overflow=setup.pool.answers_overflow,
        window=cache.window,
        window_bytes_per_token=cache.window_token_bytes,
        state_bytes=cache.state_bytes,
        num_states=pool.num_states,
        num_window_parts=pool.num_window_parts if cache.window else 0,
    )


def _max_running(setup: RankSetup, runner: ModelRunner) -> int:
    """Return how many sequences the replica runs at once: each needs a state slot if the model has states."""
    return min(setup.pool.max_running, runner.pool.num_states or setup.pool.max_running)


def _address_of_node() -> str:
    import ray  # imported on demand, so that ranks run without Ray

    return str(ray.util.get_node_ip_address()) if ray.is_initialized() else "127.0.0.1"
