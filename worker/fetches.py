"""Prefix fetching on rank 0: brings cached prefixes into the pool before the rest of a prompt is computed.

The source is a peer or a lower tier. Prompts wait in the engine's queue meanwhile. Used by both roles.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

from core.rpc import worker_pb2 as pb
from core.types.handoff import PrefixSource
from engine.scheduler.prompts import Prompt, PromptQueue
from engine.scheduler.sequence import Sequence
from engine.tiers.commands import LoadResult
from engine.tiers.tiers import Tiers
from kvtransfer.protocol.incoming_transfers import Fetch, PrefixFetches
from kvtransfer.protocol.ledger import Landing
from kvtransfer.transfer.serve_fetches import ServedFetches

logger = logging.getLogger(__name__)


class Fetches:
    """Fetches of waiting prompts. Owned by the step thread."""

    def __init__(
        self,
        queue: PromptQueue,
        prefix_fetches: PrefixFetches[Prompt],
        served_fetches: ServedFetches,
        tiers: Tiers[Prompt],
        totals: pb.Totals,
        *,
        block_size: int,
        on_incoming: Callable[[Sequence, int, int, bytes], None],
    ) -> None:
        """on_incoming: called with positions [first, end) shipped by a peer, and the features of the last one."""
        self._on_incoming = on_incoming
        self._queue = queue
        self._prefix_fetches = prefix_fetches
        self._served_fetches = served_fetches
        self._tiers = tiers
        self._totals = totals
        self._block_size = block_size
        self._prefix_sources: dict[Prompt, PrefixSource] = {}  # of prompts whose prefix a peer may hold

    def offer(self, owner: Prompt, prefix_source: PrefixSource | None, *, tokens_per_s: float) -> None:
        """Choose the source with the longest prefix: the peer reported by the router, or a lower tier.

        tokens_per_s: prefill speed; 0: unknown.
        """
        owner.num_offered = self._tiers.offer(owner.sequence, tokens_per_s=tokens_per_s)
        owner.is_loaded = owner.num_offered > 0
        if prefix_source and prefix_source.num_tokens > owner.num_offered:
            owner.num_offered, owner.is_loaded = prefix_source.num_tokens, False
            self._prefix_sources[owner] = prefix_source

    def is_fetch(self, owner: Prompt) -> bool:
        """Return whether a peer will write to the prompt's blocks, outside of any step."""
        return owner in self._prefix_sources

    def forget(self, owner: Prompt) -> None:
        """Drop the prompt's source: it needs no fetch any more."""
        self._prefix_sources.pop(owner, None)

    def begin(self, owner: Prompt) -> None:
        """Start fetching the missing prefix. Blocks evicted for it must have been saved to lower tiers."""
        sequence = owner.sequence
        first_block = sequence.num_computed // self._block_size
        hashes = sequence.hashes()[: owner.fetch_end // self._block_size]
        if prefix_source := self._prefix_sources.get(owner):
            self._prefix_fetches.begin(
                owner,
                prefix_source,
                id=f"{owner.id}/fetch/{secrets.token_hex(16)}",
                hashes=hashes,
                blocks=sequence.blocks,
                state_slots=sequence.state_slots,
                first_block=first_block,
                now=time.monotonic(),
            )
        else:
            state = (hashes[-1], sequence.state_slots[0]) if sequence.state_slots else None
            if not self._tiers.begin(owner, hashes[first_block:], sequence.blocks[first_block:], state=state):
                self._queue.fetch_failed(owner)

    def landed(self, rank: int, landing: Landing) -> None:
        """Record that a handoff, possibly that of a fetch, has landed on one rank."""
        if fetch := self._prefix_fetches.landed(rank, landing):
            landing = fetch.incoming.landing
            self._on_incoming(fetch.owner.sequence, fetch.handoff.first_token, landing.num_tokens, landing.features)
            self._totals.prefix_fetches += 1
            self._totals.fetched_tokens += fetch.num_tokens
            self._totals.fetch_seconds += time.monotonic() - fetch.begun_at
            self._queue.fetched(fetch.owner, fetch.num_tokens)

    def missed(self, fetch: Fetch[Prompt], reason: str) -> None:
        """Handle a failed fetch."""
        if self._prefix_fetches.missed(fetch):
            self._failed(fetch, reason)

    def loaded(self, rank: int, loaded: LoadResult) -> None:
        """Record that one rank has loaded a prefix, or part of it, from its lower tiers."""
        load = self._tiers.loaded(rank, loaded)
        if load is None or self._served_fetches.loaded(load):
            return
        if load.is_usable:
            num_tokens = load.num_loaded * self._block_size
            load.owner.num_loaded = num_tokens
            self._queue.fetched(load.owner, num_tokens)
        else:
            self._queue.fetch_failed(load.owner)

    def expire(self) -> None:
        """Give up fetches and loads past their deadline. Their prompts compute the prefix."""
        for fetch in self._prefix_fetches.expired(time.monotonic()):
            self._failed(fetch, fetch.incoming.problem or f"timed out after {fetch.timeout_s:.1f} s")
        for owner in self._tiers.expired():
            logger.warning("tier load timed out request=%s", owner.id)
            if not self._served_fetches.expired(owner):
                owner.sequence.leave_out(self._tiers.cancel(owner))
                self._queue.fetch_failed(owner)

    def cancel(self, owner: Prompt) -> None:
        """Cancel a prompt's fetch and load. Blocks with writes in flight are removed from its table."""
        self.forget(owner)
        if fetch := self._prefix_fetches.cancel(owner):
            owner.sequence.leave_out(fetch.incoming.opening.exposed)
        owner.sequence.leave_out(self._tiers.cancel(owner))

    def _failed(self, fetch: Fetch[Prompt], reason: str) -> None:
        logger.info("fetch failed request=%s source=%s: %s", fetch.owner.id, fetch.prefix_source.replica, reason)
        self._totals.fetch_failures += 1
        fetch.owner.sequence.leave_out(fetch.incoming.opening.exposed)
        self._queue.fetch_failed(fetch.owner)
