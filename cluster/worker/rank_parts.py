"""What the ranks of both roles are put together from: the gang, its model, and what moves its blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from cluster.model import source as model_source
from cluster.words.errors import ReplicaLost
from cluster.worker.tier_parts import LoadedPart
from engine.load import load_runner, set_threads
from engine.parallel import TensorParallel
from engine.runner import ModelRunner
from kvtransfer.links.backends import backend_for
from kvtransfer.movers.link_config import LinkConfig
from kvtransfer.movers.peers import Peers, open_gang
from kvtransfer.movers.rank_servicer import RankServicer
from kvtransfer.movers.receiver import Receiver
from kvtransfer.movers.sender import Sender
from kvtransfer.movers.wire_messages import part_to_report
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.passage import Shipment

if TYPE_CHECKING:  # they need Ray and pydantic, which this floor does without
    from cluster.words.spec import PoolSpec
    from cluster.worker.rank_process import Setup

logger = logging.getLogger(__name__)


def meet(setup: Setup, servicer: RankServicer, *, device: torch.device) -> tuple[Peers, TensorParallel]:
    """The other ranks of the gang. Returns when every one is there; raises ClusterError."""
    timeouts = setup.spec.timeouts
    setup.on_progress("meeting the other ranks", 0.0)
    return open_gang(
        servicer,
        setup.host,
        setup.addresses,
        rank=setup.rank,
        device=device,
        start_s=timeouts.start_s,
        ask_s=timeouts.handoff_s,
    )


def load(
    setup: Setup,
    pool: PoolSpec,
    parallel: TensorParallel,
    *,
    device: torch.device,
    expert_parallel: bool = False,
    redundant_experts: int = 0,
    replayed_rows: int = 0,
) -> ModelRunner:
    """The rank's share of the weights, and its KV pool. Returns when every rank has them; raises ClusterError.

    replayed_rows: of decode steps that may be replayed; see ModelRunner.
    """
    set_threads(pool.resources.cpus)
    setup.on_progress("finding the model", 0.05)
    runner = load_runner(
        model_source.resolve(setup.spec.model.source),
        dtype=setup.spec.model.dtype,
        weights=setup.spec.model.weights,
        pool_dtype=setup.spec.kv.pool_dtype,
        block_size=setup.spec.kv.block_size,
        kv_memory_gib=pool.kv_memory_gib,
        parallel=parallel,
        expert_parallel=expert_parallel,
        redundant_experts=redundant_experts,
        is_deterministic=setup.spec.engine.deterministic,
        replayed_rows=replayed_rows if setup.spec.engine.cuda_graphs == "auto" else 0,
        device=device,
        progress=lambda fraction: setup.on_progress("loading weights", 0.1 + 0.9 * fraction),
    )
    setup.on_progress("waiting for the other ranks", 1.0)
    parallel.wait_for_all("load", timeout_s=setup.spec.timeouts.start_s)
    runner.warm_up(pool.max_batch_tokens)
    return runner


def make_sender(setup: Setup, runner: ModelRunner, on_shipped: Callable[[Shipment], None]) -> Sender:
    return Sender(
        _link_config(setup, runner),
        name=f"{setup.replica}/{setup.rank}",
        loop=setup.host.loop,
        on_shipped=on_shipped,
    )


def make_receiver(
    setup: Setup, runner: ModelRunner, servicer: RankServicer, on_landed: Callable[[Landing], None]
) -> Receiver:
    """The rank's receiver, which serves senders elsewhere from now on."""
    servicer.receiver = Receiver(_link_config(setup, runner), meeting=servicer.meeting, on_landed=on_landed)
    return servicer.receiver


def _link_config(setup: Setup, runner: ModelRunner) -> LinkConfig:
    return LinkConfig(
        rank=setup.rank,
        pool=runner.pool,
        wire_dtype=setup.spec.kv.wire_dtype,
        backend=backend_for(runner.pool.device, host_link=setup.spec.kv.host_link),
        host=setup.host.host,
        timeout_s=setup.spec.timeouts.transfer_s,
        probe=setup.probe,
    )


def close_handoff(setup: Setup, peers: Peers, handoff: str, then: Callable[[], None]) -> None:
    """On rank 0, from any thread: close a handoff on the other ranks, then call `then` on the event loop."""

    async def close() -> None:
        try:
            await peers.close_handoff(handoff)
        except ReplicaLost as error:  # the gang is broken, and with it its pool: the blocks stay in quarantine
            logger.error("handoff %s cannot be closed: %s", handoff, error)
            return
        then()

    setup.host.spawn(close())


def report(setup: Setup, peers: Peers, part: Landing | Shipment | LoadedPart) -> None:
    """On the other ranks, from any thread: tell rank 0."""
    if isinstance(part, LoadedPart):
        report = part.to_report(rank=setup.rank)
    else:
        report = part_to_report(part, rank=setup.rank)
    setup.host.spawn(peers.report(report))
