"""What reaches rank 0 from elsewhere, on its way to the step thread: how far its ranks have come, and lost pulls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvtransfer.movers.peers import Peers
from kvtransfer.movers.pull_call import ask_holder

from cluster.rpc import transfer_pb2
from cluster.worker import rank_parts
from cluster.worker.replica_engine import ReplicaEngine
from cluster.worker.tier_parts import loaded_from_report
from engine.kv.block_manager import BlockManager
from engine.prompts import Prompt
from engine.runner import ModelRunner
from engine.tiers.orders import LoadResult
from kvtransfer.movers.receiver import Receiver
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.passage import Shipment
from kvtransfer.protocol.pulls import Pull, Pulls

if TYPE_CHECKING:  # it needs Ray and pydantic, which this floor does without
    from cluster.worker.rank_process import Setup


class Leader(Protocol):
    """The step loop of rank 0, of either role. Called on the step thread."""

    replica: ReplicaEngine

    def landed(self, rank: int, landing: Landing, /) -> None: ...

    def shipped(self, rank: int, shipment: Shipment, /) -> None: ...


class Inbox:
    """Everything but the constructor and `open` may be called from any thread."""

    def __init__(self, setup: Setup, peers: Peers) -> None:
        self._setup = setup
        self._peers = peers
        self._leader: Leader | None = None
        self._post: Callable[[Callable[[], None]], None] | None = None

    def open(self, leader: Leader, post: Callable[[Callable[[], None]], None]) -> None:
        """From now on things reach `leader`; before that nothing may come. `post` runs a command on the step thread."""
        self._leader, self._post = leader, post

    def landed(self, rank: int, landing: Landing) -> None:
        """A handoff's KV, or a prefix that we fetch, is whole on one of our ranks."""
        self._tell(lambda leader: leader.landed(rank, landing))

    def missed(self, pull: Pull[Prompt], reason: str) -> None:
        """Nothing comes of a pull."""
        self._tell(lambda leader: leader.replica.fetches.missed(pull, reason))

    def shipped(self, rank: int, shipment: Shipment) -> None:
        """One of our ranks has nothing more to send for a handoff."""
        self._tell(lambda leader: leader.shipped(rank, shipment))

    def loaded(self, rank: int, loaded: LoadResult) -> None:
        """One of our ranks has done with a load from its lower tiers."""
        self._tell(lambda leader: leader.replica.fetches.loaded(rank, loaded))

    def reported(self, report: transfer_pb2.ReportRequest) -> None:
        """The same, told by one of the other ranks."""
        part = report.WhichOneof("part")
        if part == "landed":
            self.landed(report.rank, Landing.from_report(report.landed))
        elif part == "shipped":
            self.shipped(report.rank, Shipment.from_report(report.shipped))
        elif part == "loaded":
            self.loaded(report.rank, loaded_from_report(report.loaded))

    def close_handoff(self, handoff: str, then: Callable[[], None]) -> None:
        """Close a handoff on the other ranks, then run a command on the step thread."""
        post = self._post
        assert post
        rank_parts.close_handoff(self._setup, self._peers, handoff, lambda: post(then))

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

    def _tell(self, command: Callable[[Leader], None]) -> None:
        leader, post = self._leader, self._post
        assert leader and post, "open() comes first"
        post(lambda: command(leader))
