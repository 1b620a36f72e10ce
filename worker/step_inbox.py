"""What reaches rank 0 from elsewhere, on its way to the step thread: how far its ranks have come, and lost pulls."""

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
from worker.replica_service import RoleWorker

logger = logging.getLogger(__name__)


class Inbox:
    """Everything but the constructor, `open` and `close` may be called from any thread."""

    def __init__(self, setup: RankSetup, others: OtherRanks) -> None:
        self._setup = setup
        self._others = others
        self._worker: RoleWorker | None = None
        self._post: Callable[[Callable[[], None]], None] | None = None
        self._prefix_sources: PrefixSourceChannels | None = None

    def open(self, worker: RoleWorker, post: Callable[[Callable[[], None]], None]) -> None:
        """From now on things reach `worker`; before that nothing may come. `post` runs a command on the step thread."""
        self._worker, self._post = worker, post

    def heard(self, rank: int, part: Part) -> None:
        """What has come, gone, or been loaded on one of our ranks."""
        if isinstance(part, Landing):
            self._tell(lambda worker: worker.landed(rank, part))
        elif isinstance(part, Shipment):
            self._tell(lambda worker: worker.shipped(rank, part))
        else:
            self._tell(lambda worker: worker.replica.fetches.loaded(rank, part))

    def reported(self, rank: int, part: Part) -> None:
        """The same, told by one of the other ranks. Raises RequestError where there is none of that number."""
        check(0 < rank < len(self._setup.addresses), "rank", "is none of the other ranks of this replica")
        self.heard(rank, part)

    def missed(self, fetch: Fetch[Prompt], reason: str) -> None:
        """Nothing comes of a pull."""
        self._tell(lambda worker: worker.replica.fetches.missed(fetch, reason))

    def close_handoff(self, handoff: str, then: Callable[[], None]) -> None:
        """Close a handoff on the other ranks, then run a command on the step thread."""
        post = self._post
        assert post

        async def close() -> None:
            try:
                await self._others.close_handoff(handoff)
            except ReplicaLost as error:  # the gang is broken, and with it its pool: the blocks stay in quarantine
                logger.error("handoff %s cannot be closed: %s", handoff, error)
                return
            post(then)

        self._setup.host.spawn(close())

    def make_fetches(self, layout: KVLayout, receiver: Receiver, blocks: BlockManager) -> PrefixFetches[Prompt]:
        """The pulls of this replica, whose misfortunes come here."""
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
                prefix_sources.ask(fetch, others, functools.partial(self.missed, fetch))
            ),
        )

    async def close(self) -> None:
        """Ask no holder any more. On the event loop."""
        if self._prefix_sources:
            await self._prefix_sources.close()

    def _tell(self, command: Callable[[RoleWorker], None]) -> None:
        worker, post = self._worker, self._post
        assert worker and post, "open() comes first"
        post(lambda: command(worker))
