"""Prefixes that rank 0 brings into its pool before the rest is computed: from a peer, or from its own lower tiers.

The same for both roles. Whoever waits for a prefix waits in the engine's queue; it is told there what came.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from core.rpc import worker_pb2 as pb
from core.types.handoff import Holder
from engine.scheduler.prompts import Prompt, PromptQueue
from engine.scheduler.sequence import Sequence
from engine.tiers.commands import LoadResult
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.fetches import Pull, Pulls
from kvtransfer.protocol.ledger import Landing
from kvtransfer.transfer.serve_fetches import Grants

logger = logging.getLogger(__name__)


class Fetches:
    """Owned by the step thread."""

    def __init__(
        self,
        queue: PromptQueue,
        pulls: Pulls[Prompt],
        grants: Grants,
        tiers: Tiers[Prompt],
        totals: pb.Totals,
        *,
        block_size: int,
        on_arrival: Callable[[Sequence, int, int, bytes], None],
    ) -> None:
        """on_arrival: told of positions [first, end) that a peer has shipped, and its features of the last."""
        self._on_arrival = on_arrival
        self._queue = queue
        self._pulls = pulls
        self._grants = grants
        self._tiers = tiers
        self._totals = totals
        self._block_size = block_size
        self._holders: dict[Prompt, Holder] = {}  # of those whose prefix a peer may hold

    def offer(self, owner: Prompt, holder: Holder | None, *, tokens_per_s: float) -> None:
        """Note who brings the most of its prefix: a peer that is said to hold some, or our lower tiers.

        tokens_per_s: of computing; 0: not yet known.
        """
        owner.num_offered = self._tiers.offer(owner.sequence, tokens_per_s=tokens_per_s)
        if holder and holder.num_tokens > owner.num_offered:
            owner.num_offered = holder.num_tokens
            self._holders[owner] = holder

    def is_pull(self, owner: Prompt) -> bool:
        """Whether a peer will write to its blocks, outside of any step."""
        return owner in self._holders

    def forget(self, owner: Prompt) -> None:
        """It waits no more, and has all that it is going to get."""
        self._holders.pop(owner, None)

    def begin(self, owner: Prompt) -> None:
        """Bring here what it lacks of its prefix; meanwhile it waits. What was evicted for it has been copied."""
        sequence = owner.sequence
        first_block = sequence.num_computed // self._block_size
        hashes = sequence.hashes()[: owner.fetch_end // self._block_size]
        if holder := self._holders.get(owner):
            self._pulls.begin(
                owner,
                holder,
                id=f"{owner.id}/{secrets.token_hex(16)}",
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
            first_token = pull.opening.first_token
            self._on_arrival(pull.owner.sequence, first_token, first_token + pull.num_tokens, pull.features)
            self._totals.pulls += 1
            self._totals.pulled_tokens += pull.num_tokens
            self._totals.pull_seconds += time.monotonic() - pull.begun_at
            self._queue.fetched(pull.owner, pull.num_tokens)

    def missed(self, pull: Pull[Prompt], reason: str) -> None:
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
            load.owner.num_loaded = num_tokens
            self._queue.fetched(load.owner, num_tokens)
        else:
            self._queue.fetch_failed(load.owner)

    def expire(self) -> None:
        """Give up what has not come in time: its owner computes it."""
        for pull in self._pulls.expired(time.monotonic()):
            self._failed(pull, pull.problem or f"nothing came within {pull.timeout_s:.1f} s")
        for owner in self._tiers.expired():
            logger.warning("blocks could not be loaded in time request=%s", owner.id)
            if not self._grants.expired(owner):
                owner.sequence.leave_out(self._tiers.cancel(owner))
                self._queue.fetch_failed(owner)

    def cancel(self, owner: Prompt) -> None:
        """Nobody waits for it any more. Blocks that something may still be written to leave its table."""
        self.forget(owner)
        if pull := self._pulls.cancel(owner):
            owner.sequence.leave_out(pull.exposed)
        owner.sequence.leave_out(self._tiers.cancel(owner))

    def _failed(self, pull: Pull[Prompt], reason: str) -> None:
        logger.info("pull failed request=%s holder=%s: %s", pull.owner.id, pull.holder.replica, reason)
        self._totals.pull_failures += 1
        pull.owner.sequence.leave_out(pull.exposed)
        self._queue.fetch_failed(pull.owner)
