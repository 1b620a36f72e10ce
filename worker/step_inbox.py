"""Inbox of rank 0: passes reports of ranks and failed fetches to the step thread."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from core.types.errors import ReplicaLost
from core.types.validation import check
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from engine.scheduler.prompts import Prompt
from kvtransfer.protocol.fetches import Fetch, PrefixFetches
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.transfer.receiver import Receiver
from kvtransfer.transfer.wire_messages import Part
from worker.fetch_client import PrefixSourceChannels
from worker.rank_group import OtherRanks
from worker.rank_setup import RankSetup
from worker.worker import Worker

logger = logging.getLogger(__name__)


class Inbox:
    """Inbox of rank 0. All methods except the constructor, `open` and `close` are thread-safe."""

    def __init__(self, setup: RankSetup, others: OtherRanks) -> None:
        self._setup = setup
        self._others = others
        self._worker: Worker | None = None
        self._post: Callable[[Callable[[], None]], None] | None = None
        self._prefix_sources: PrefixSourceChannels | None = None

    def open(self, worker: Worker, post: Callable[[Callable[[], None]], None]) -> None:
        """Start delivering to `worker`. Must precede any report. `post` runs a command on the step thread."""
        self._worker, self._post = worker, post

    def on_part(self, rank: int, part: Part) -> None:
        """Deliver a landing, a shipment or a load result of one rank."""
        if isinstance(part, Landing):
            self._deliver(lambda worker: worker.landed(rank, part))
        elif isinstance(part, Shipment):
            self._deliver(lambda worker: worker.shipped(rank, part))
        else:
            self._deliver(lambda worker: worker.fetches.loaded(rank, part))

    def on_report(self, rank: int, part: Part) -> None:
        """Deliver a report of another rank. Raises RequestError for an unknown rank."""
        num_ranks = len(self._setup.addresses)
        check(0 < rank < num_ranks, "rank", f"must be another rank of this replica, from 1 to {num_ranks - 1}")
        self.on_part(rank, part)

    def missed(self, fetch: Fetch[Prompt], reason: str) -> None:
        """Deliver the failure of a fetch."""
        self._deliver(lambda worker: worker.fetches.missed(fetch, reason))

    def close_handoff(self, handoff: str, then: Callable[[], None]) -> None:
        """Close a handoff on the other ranks, then run a command on the step thread."""
        post = self._post
        assert post

        async def close() -> None:
            try:
                await self._others.close_handoff(handoff)
            except ReplicaLost as error:  # the gang is broken, so the blocks stay in quarantine
                logger.error("failed to close handoff=%s: %s", handoff, error)
                return
            post(then)

        self._setup.host.spawn(close())

    def make_fetches(self, layout: KVLayout, receiver: Receiver, blocks: BlockManager) -> PrefixFetches[Prompt]:
        """Create the registry of this replica's prefix fetches; their failures are delivered here."""
        setup, others = self._setup, self._others
        prefix_sources = self._prefix_sources = PrefixSourceChannels(setup.host.identity)
        return PrefixFetches(
            receiver,
            blocks,
            replica=setup.replica,
            addresses=setup.addresses,
            layout=layout,
            timeout_s=setup.spec.timeouts.transfer_s,
            close_elsewhere=self.close_handoff,
            call=lambda fetch: setup.host.spawn(
                prefix_sources.fetch(fetch, others, functools.partial(self.missed, fetch))
            ),
        )

    async def close(self) -> None:
        """Close the channels to source replicas. Runs on the event loop."""
        if self._prefix_sources:
            await self._prefix_sources.close()

    def _deliver(self, command: Callable[[Worker], None]) -> None:
        worker, post = self._worker, self._post
        assert worker and post, "call open() first"
        post(lambda: command(worker))
