"""A rank of a decode replica: how its parts are put together."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from grpc import aio

from cluster import model_source
from cluster.background import BackgroundThread
from cluster.errors import ReplicaLost
from cluster.frames import FrameHub, WorkerServicer
from cluster.membership import Member
from cluster.rank_process import RankProcess, Setup
from cluster.replica_service import ReplicaService
from cluster.request import Role, SequenceRequest
from cluster.rpc import transfer_pb2, transfer_pb2_grpc, worker_pb2_grpc
from decode_worker.rank import DecodeRank
from decode_worker.server import DecodeServicer, Serving
from decode_worker.worker import Decoder
from engine.block_manager import BlockManager
from engine.decode_scheduler import Scheduler
from engine.load import device_for, load_runner, max_tokens_of, set_threads
from engine.runner import ModelRunner
from engine.sequence import Sequence
from kvtransfer.ledger import Landing
from kvtransfer.passage import Shipment
from kvtransfer.peers import Peers, open_gang
from kvtransfer.rank_servicer import RankServicer
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender

logger = logging.getLogger(__name__)


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
        self._following: BackgroundThread | None = None
        self._peers: Peers | None = None
        self._sender: Sender | None = None

    def register(self, server: aio.Server) -> None:
        transfer_pb2_grpc.add_RankServicer_to_server(self._ranks, server)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(self._hub), server)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self._requests, server)

    def load(self, setup: Setup) -> int:
        peers, runner = self._open(setup)
        if setup.rank == 0:
            self._serve(setup, runner, peers)
        else:
            report = functools.partial(_report, setup, peers)
            self._ranks.receiver = self._receiver(setup, runner, report)
            rank = DecodeRank(runner, self._make_sender(setup, runner, report))
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
        pool, timeouts = setup.spec.decode, setup.spec.timeouts
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
            expert_parallel=pool.expert_parallel,
            device=self._device,
            progress=lambda fraction: setup.on_progress("loading weights", 0.1 + 0.9 * fraction),
        )
        setup.on_progress("waiting for the other ranks", 1.0)
        parallel.wait_for_all("load", timeout_s=timeouts.start_s)
        return self._peers, runner

    def _receiver(self, setup: Setup, runner: ModelRunner, on_landed: Callable[[Landing], None]) -> Receiver:
        return Receiver(
            rank=setup.rank,
            pool=runner.pool,
            wire_dtype=setup.spec.kv.wire_dtype,
            host=setup.host.host,
            timeout_s=setup.spec.timeouts.transfer_s,
            meeting=self._ranks.meeting,
            on_landed=on_landed,
        )

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

    def _serve(self, setup: Setup, runner: ModelRunner, peers: Peers) -> None:
        """Rank 0: begin to take requests."""
        pool, layout = setup.spec.decode, runner.layout
        blocks = BlockManager(runner.pool.num_blocks)
        scheduler = Scheduler(
            blocks,
            max_batch_tokens=pool.max_batch_tokens,
            max_running=pool.max_running,
            max_waiting=pool.max_waiting,
        )
        self._ranks.receiver = receiver = self._receiver(setup, runner, functools.partial(self._landed, 0))
        decoder = Decoder(
            DecodeRank(runner, self._make_sender(setup, runner, functools.partial(self._shipped, 0))),
            receiver,
            blocks,
            scheduler,
            replica=setup.replica,
            addresses=setup.addresses,
            handoff_s=setup.spec.timeouts.handoff_s,
            close_handoff=lambda handoff, then: self._close_handoff(setup, peers, handoff, then),
        )
        self.service = ReplicaService(decoder, setup.host, self._hub, replica=setup.replica)
        max_tokens = max_tokens_of(runner, limit=setup.spec.model.max_context)

        def sequence_of(request: SequenceRequest) -> Sequence:
            # After a migration, what runs here may be any of the client's choices.
            first = request.choices[0]
            return Sequence(request, first, model=layout.model, block_size=layout.block_size, max_context=max_tokens)

        self._requests.serving = Serving(self.service, decoder, peers, sequence_of)
        self._ranks.on_report = self._reported
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
        )
        self.service.start(
            index_url=setup.index_url, name=setup.spec.name, member=member, other_ranks=setup.addresses[1:]
        )

    def _landed(self, rank: int, landing: Landing) -> None:
        """On rank 0, from any thread: a handoff's KV is whole on one of our ranks."""
        serving = self._requests.serving
        assert serving
        serving.service.post(lambda: serving.decoder.landed(rank, landing))

    def _shipped(self, rank: int, shipment: Shipment) -> None:
        """On rank 0, from any thread: one of our ranks has nothing more to send for a handoff."""
        serving = self._requests.serving
        assert serving
        serving.service.post(lambda: serving.decoder.shipped(rank, shipment))

    def _reported(self, report: transfer_pb2.ReportRequest) -> None:
        if report.WhichOneof("part") == "landed":
            self._landed(report.rank, Landing.from_report(report.landed))
        else:
            self._shipped(report.rank, Shipment.from_report(report.shipped))

    def _close_handoff(self, setup: Setup, peers: Peers, handoff: str, then: Callable[[], None]) -> None:
        """On rank 0's step thread: close a handoff on the other ranks, then run a command on the step thread."""
        service = self.service
        assert service

        async def close() -> None:
            try:
                await peers.close_handoff(handoff)
            except ReplicaLost as error:  # the gang is broken, and with it its pool: the blocks stay in quarantine
                logger.error("handoff %s cannot be closed: %s", handoff, error)
                return
            service.post(then)

        setup.host.spawn(close())


def _report(setup: Setup, peers: Peers, part: Landing | Shipment) -> None:
    """On the other ranks, from any thread: tell rank 0."""
    setup.host.spawn(peers.report(part.to_report(rank=setup.rank)))
