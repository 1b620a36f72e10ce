"""What reaches rank 0 from elsewhere, on its way to the step thread: how far its ranks have come, and lost pulls."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from cluster.rpc import transfer_pb2
from cluster.words.errors import ReplicaLost
from cluster.worker.lower_tiers import loaded_from_report
from cluster.worker.peers import Peers
from cluster.worker.pull_call import ask_holder
from cluster.worker.rank_setup import RankSetup
from cluster.worker.replica_service import RoleWorker
from engine.kv.block_manager import BlockManager
from engine.prompts import Prompt
from engine.runner import ModelRunner
from engine.tiers.orders import LoadResult
from kvtransfer.movers.receiver import Receiver
from kvtransfer.movers.wire_messages import landing_from_proto, shipment_from_proto
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.passage import Shipment
from kvtransfer.protocol.pulls import Pull, Pulls

logger = logging.getLogger(__name__)


class Inbox:
    """Everything but the constructor and `open` may be called from any thread."""

    def __init__(self, setup: RankSetup, peers: Peers) -> None:
        self._setup = setup
        self._peers = peers
        self._worker: RoleWorker | None = None
        self._post: Callable[[Callable[[], None]], None] | None = None

    def open(self, worker: RoleWorker, post: Callable[[Callable[[], None]], None]) -> None:
        """From now on things reach `worker`; before that nothing may come. `post` runs a command on the step thread."""
        self._worker, self._post = worker, post

    def landed(self, rank: int, landing: Landing) -> None:
        """A handoff's KV, or a prefix that we fetch, is whole on one of our ranks."""
        self._tell(lambda worker: worker.landed(rank, landing))

    def missed(self, pull: Pull[Prompt], reason: str) -> None:
        """Nothing comes of a pull."""
        self._tell(lambda worker: worker.replica.fetches.missed(pull, reason))

    def shipped(self, rank: int, shipment: Shipment) -> None:
        """One of our ranks has nothing more to send for a handoff."""
        self._tell(lambda worker: worker.shipped(rank, shipment))

    def loaded(self, rank: int, loaded: LoadResult) -> None:
        """One of our ranks has done with a load from its lower tiers."""
        self._tell(lambda worker: worker.replica.fetches.loaded(rank, loaded))

    def reported(self, report: transfer_pb2.ReportRequest) -> None:
        """The same, told by one of the other ranks."""
        part = report.WhichOneof("part")
        if part == "landed":
            self.landed(report.rank, landing_from_proto(report.landed))
        elif part == "shipped":
            self.shipped(report.rank, shipment_from_proto(report.shipped))
        elif part == "loaded":
            self.loaded(report.rank, loaded_from_report(report.loaded))

    def close_handoff(self, handoff: str, then: Callable[[], None]) -> None:
        """Close a handoff on the other ranks, then run a command on the step thread."""
        post = self._post
        assert post

        async def close() -> None:
            try:
                await self._peers.close_handoff(handoff)
            except ReplicaLost as error:  # the gang is broken, and with it its pool: the blocks stay in quarantine
                logger.error("handoff %s cannot be closed: %s", handoff, error)
                return
            post(then)

        self._setup.host.spawn(close())

    def make_pulls(self, runner: ModelRunner, receiver: Receiver, blocks: BlockManager) -> Pulls[Prompt]:
        """The pulls of this replica, whose misfortunes come here."""
        setup, peers = self._setup, self._peers
        return Pulls(
            receiver,
            blocks,
            replica=setup.replica,
            addresses=setup.addresses,
            layout=runner.layout,
            timeout_s=setup.spec.timeouts.transfer_s,
            close_elsewhere=self.close_handoff,
            call=lambda pull: setup.host.spawn(ask_holder(pull, peers, functools.partial(self.missed, pull))),
        )

    def _tell(self, command: Callable[[RoleWorker], None]) -> None:
        worker, post = self._worker, self._post
        assert worker and post, "open() comes first"
        post(lambda: command(worker))
