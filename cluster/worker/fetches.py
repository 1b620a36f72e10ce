"""Prefixes that rank 0 brings into its pool before the rest is computed: from a peer, or from its own lower tiers.

The same for both roles. Whoever waits for a prefix waits in its scheduler; it is told there what came.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from cluster.rpc import worker_pb2 as pb
from cluster.words.handoff import Holder
from engine.sequence import Sequence
from engine.tiers.orders import LoadResult
from engine.tiers.tiers import Tiers
from kvtransfer.movers.grants import Grants
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.pulls import Pull, Pulls

logger = logging.getLogger(__name__)


class Waiting(Hashable, Protocol):
    """Whose prefix it is: a job, or a group. See engine's schedulers."""

    num_offered: int

    @property
    def id(self) -> str: ...

    @property
    def fetch_end(self) -> int: ...


T = TypeVar("T", bound=Waiting)
Owner = TypeVar("Owner", contravariant=True)


class Queue(Protocol[Owner]):
    """The scheduler in which they wait."""

    def fetched(self, owner: Owner, num_tokens: int, /) -> None: ...

    def fetch_failed(self, owner: Owner, /) -> None: ...


class Fetches(Generic[T]):
    """Owned by the step thread. `sequence_of` gives the sequence whose blocks are filled; `loaded_here(owner, tokens)`
    books what came from a lower tier."""

    def __init__(
        self,
        queue: Queue[T],
        pulls: Pulls[T],
        grants: Grants,
        tiers: Tiers[T],
        totals: pb.Totals,
        *,
        block_size: int,
        sequence_of: Callable[[T], Sequence],
        loaded_here: Callable[[T, int], None],
    ) -> None:
        self._queue = queue
        self._pulls = pulls
        self._grants = grants
        self._tiers = tiers
        self._totals = totals
        self._block_size = block_size
        self._sequence_of = sequence_of
        self._loaded_here = loaded_here
        self._holders: dict[T, Holder] = {}  # of those whose prefix a peer may hold

    def offer(self, owner: T, holder: Holder | None, *, tokens_per_s: float) -> None:
        """Note who brings the most of its prefix: a peer that is said to hold some, or our lower tiers.

        tokens_per_s: of computing; 0: not yet known.
        """
        owner.num_offered = self._tiers.offer(self._sequence_of(owner), tokens_per_s=tokens_per_s)
        if holder and holder.num_tokens > owner.num_offered:
            owner.num_offered = holder.num_tokens
            self._holders[owner] = holder

    def is_pull(self, owner: T) -> bool:
        """Whether a peer will write to its blocks, outside of any step."""
        return owner in self._holders

    def forget(self, owner: T) -> None:
        """It waits no more, and has all that it is going to get."""
        self._holders.pop(owner, None)

    def begin(self, owner: T) -> None:
        """Bring here what it lacks of its prefix; meanwhile it waits. What was evicted for it has been copied."""
        sequence = self._sequence_of(owner)
        first_block = sequence.num_computed // self._block_size
        hashes = sequence.hashes()[: owner.fetch_end // self._block_size]
        if holder := self._holders.get(owner):
            self._pulls.begin(
                owner,
                holder,
                id=owner.id,
                hashes=hashes,
                blocks=sequence.blocks,
                first_block=first_block,
                now=time.monotonic(),
            )
        elif not self._tiers.begin(owner, hashes[first_block:], sequence.blocks[first_block:]):
            self._queue.fetch_failed(owner)

    def landed(self, rank: int, landing: Landing) -> None:
        """One rank has a handoff whole, perhaps that of a pull."""
        if pull := self._pulls.landed(rank, landing):
            self._totals.pulls += 1
            self._totals.pulled_tokens += pull.num_tokens
            self._totals.pull_seconds += time.monotonic() - pull.begun_at
            self._queue.fetched(pull.owner, pull.num_tokens)

    def missed(self, pull: Pull[T], reason: str) -> None:
        """Nothing comes of a pull."""
        if self._pulls.missed(pull):
            self._failed(pull, reason)

    def loaded(self, rank: int, loaded: LoadResult) -> None:
        """One rank has brought back what it could of a prefix that lay in its lower tiers."""
        load = self._tiers.loaded(rank, loaded)
        if load is None or self._grants.loaded(load):
            return
        if load.num_loaded:
            num_tokens = load.num_loaded * self._block_size
            self._queue.fetched(load.owner, num_tokens)
            self._loaded_here(load.owner, num_tokens)
        else:
            self._queue.fetch_failed(load.owner)

    def expire(self) -> None:
        """Give up what has not come in time: its owner computes it."""
        for pull in self._pulls.expired(time.monotonic()):
            self._failed(pull, f"nothing came within {pull.timeout_s:.1f} s")
        for owner in self._tiers.expired():
            logger.warning("blocks could not be loaded in time request=%s", owner.id)
            if not self._grants.expired(owner):
                self._sequence_of(owner).leave_out(self._tiers.cancel(owner))
                self._queue.fetch_failed(owner)

    def cancel(self, owner: T) -> None:
        """Nobody waits for it any more. Blocks that something may still be written to leave its table."""
        self.forget(owner)
        if pull := self._pulls.cancel(owner):
            self._sequence_of(owner).leave_out(pull.exposed)
        self._sequence_of(owner).leave_out(self._tiers.cancel(owner))

    def _failed(self, pull: Pull[T], reason: str) -> None:
        logger.info("pull failed request=%s holder=%s: %s", pull.owner.id, pull.holder.replica, reason)
        self._totals.pull_failures += 1
        self._sequence_of(pull.owner).leave_out(pull.exposed)
        self._queue.fetch_failed(pull.owner)
