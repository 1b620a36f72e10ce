"""A rank of a prefill replica: how its parts are put together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from grpc import aio

from cluster import model_source
from cluster.background import BackgroundThread
from cluster.frames import FrameHub, WorkerServicer
from cluster.membership import Member
from cluster.rank_process import RankProcess, Setup
from cluster.replica_service import ReplicaService
from cluster.request import Role, SequenceRequest
from cluster.rpc import transfer_pb2, transfer_pb2_grpc, worker_pb2_grpc
from engine.block_manager import BlockManager
from engine.load import device_for, load_runner, max_tokens_of, set_threads
from engine.prefill_scheduler import Scheduler
from engine.runner import ModelRunner
from engine.sequence import Sequence
from kvtransfer.passage import Shipment
from kvtransfer.peers import Peers, open_gang
from kvtransfer.rank_servicer import RankServicer
from kvtransfer.sender import Sender
from prefill_worker.rank import PrefillRank
from prefill_worker.server import PrefillServicer, Serving
from prefill_worker.worker import Prefiller


def make_rank(spec: dict[str, Any], **arguments: Any) -> RankProcess:
    """What the controller starts: one rank of a prefill replica."""
    return RankProcess(spec, body=PrefillBody(spec), **arguments)


class PrefillBody:
    """Rank 0 schedules and answers routers; every rank computes and ships its own heads."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._device = device_for(gpus=spec["prefill"]["resources"]["gpus"])
        self.device = str(self._device)
        self.service: ReplicaService | None = None
        self._hub = FrameHub()
        self._ranks = RankServicer()
        self._prompts = PrefillServicer()
        self._following: BackgroundThread | None = None
        self._peers: Peers | None = None
        self._sender: Sender | None = None

    def register(self, server: aio.Server) -> None:
        transfer_pb2_grpc.add_RankServicer_to_server(self._ranks, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self._hub), server)
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self._prompts, server)

    def load(self, setup: Setup) -> int:
        peers, runner = self._open(setup)
        if setup.rank == 0:
            self._serve(setup, runner)
        else:
            rank = PrefillRank(runner, self._make_sender(setup, runner, functools.partial(_report, setup, peers)))
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
        if self._peers:
            await self._peers.disconnect()

    def _open(self, setup: Setup) -> tuple[Peers, ModelRunner]:
        """Meet the other ranks and load the weights."""
        pool, timeouts = setup.spec.prefill, setup.spec.timeouts
        setup.on_progress("finding the model", 0.0)
        model_dir = model_source.resolve(setup.spec.model.source)
        set_threads(pool.resources.cpus)
        setup.on_progress("meeting the other ranks", 0.05)
        self._peers, parallel = open_gang(
            self._ranks,
            setup.host,
            setup.addresses,
            rank=setup.rank,
            device=self._device,
            start_s=timeouts.start_s,
            ask_s=timeouts.handoff_s,
        )
        runner = load_runner(
            model_dir,
            dtype=setup.spec.model.dtype,
            weights=setup.spec.model.weights,
            pool_dtype=setup.spec.kv.pool_dtype,
            block_size=setup.spec.kv.block_size,
            kv_memory_gib=pool.kv_memory_gib,
            parallel=parallel,
            device=self._device,
            progress=lambda fraction: setup.on_progress("loading weights", 0.1 + 0.9 * fraction),
        )
        setup.on_progress("waiting for the other ranks", 1.0)
        parallel.wait_for_all("load", timeout_s=timeouts.start_s)
        return self._peers, runner

    def _make_sender(self, setup: Setup, runner: ModelRunner, on_shipped: Callable[[Shipment], None]) -> Sender:
        self._sender = Sender(
            name=f"{setup.replica}/{setup.rank}",
            rank=setup.rank,
            pool=runner.pool,
            wire_dtype=setup.spec.kv.wire_dtype,
            host=setup.host.host,
            timeout_s=setup.spec.timeouts.transfer_s,
            loop=setup.host.loop,
            on_shipped=on_shipped,
        )
        return self._sender

    def _serve(self, setup: Setup, runner: ModelRunner) -> None:
        """Rank 0: begin to take prompts."""
        pool, layout = setup.spec.prefill, runner.layout
        blocks = BlockManager(runner.pool.num_blocks)
        scheduler = Scheduler(
            blocks,
            max_batch_tokens=pool.max_batch_tokens,
            max_running=pool.max_running,
            max_waiting=pool.max_waiting,
        )
        on_shipped = functools.partial(self._shipped, 0)
        prefiller = Prefiller(PrefillRank(runner, self._make_sender(setup, runner, on_shipped)), blocks, scheduler)
        self.service = ReplicaService(prefiller, setup.host, self._hub, replica=setup.replica)
        max_tokens = max_tokens_of(runner, limit=setup.spec.model.max_context)

        def sequence_of(request: SequenceRequest) -> Sequence:
            # After a migration, what runs here may be any of the client's choices.
            first = request.choices[0]
            return Sequence(request, first, model=layout.model, block_size=layout.block_size, max_context=max_tokens)

        self._prompts.serving = Serving(self.service, prefiller, sequence_of)
        self._ranks.on_report = self._reported
        member = Member(
            replica=setup.replica,
            role=Role.PREFILL,
            address=setup.addresses[0],
            layout=layout.fingerprint,
            num_blocks=runner.pool.num_blocks,
            block_size=layout.block_size,
            bytes_per_token=layout.bytes_per_token() * layout.tensor_parallel,
            max_tokens=max_tokens,
            max_running=pool.max_running,
        )
        self.service.start(
            index_url=setup.index_url, name=setup.spec.name, member=member, other_ranks=setup.addresses[1:]
        )

    def _shipped(self, rank: int, shipment: Shipment) -> None:
        """On rank 0, from any thread: one of our ranks has nothing more to send for a handoff."""
        serving = self._prompts.serving
        assert serving
        serving.service.post(lambda: serving.prefiller.shipped(rank, shipment))

    def _reported(self, report: transfer_pb2.ReportRequest) -> None:
        self._shipped(report.rank, Shipment.from_report(report.shipped))


def _report(setup: Setup, peers: Peers, shipment: Shipment) -> None:
    """On the other ranks, from any thread: tell rank 0."""
    setup.host.spawn(peers.report(shipment.to_report(rank=setup.rank)))
