"""Which prompts are computed in the next step: first come, first served, in chunks."""

from __future__ import annotations

import itertools
from bisect import insort
from dataclasses import dataclass
from typing import Any

from cluster.words.errors import CapacityError, ContextLengthExceeded
from cluster.words.handoff import Handoff
from engine.kv.block_manager import BlockManager
from engine.sequence import Sequence

# The life of a job:
#
#     waiting ──blocks──────────────────────────────> running ──all computed──> gone
#        ^ └──blocks, and somebody holds more──> fetching ──fetched──^
#        └───────────────── fetch_failed ───────────┘
#
# One that only fetches is gone as soon as there is nothing more to fetch: see take_fetched.


@dataclass(eq=False)
class Job:
    """One prompt to compute, and where its KV goes. `handoff` is None when only the first tokens are wanted."""

    sequence: Sequence
    handoff: Handoff | None
    fetch_only: bool = False  # its prefix is brought here, and nothing is computed
    num_offered: int = 0  # leading tokens that a peer, or a tier below this pool, is said to hold; 0: not counted on
    num_here: int = 0  # leading tokens that were in the prefix cache when it was queued
    num_cached: int = 0  # tokens found in the prefix cache when it was admitted
    num_fetched: int = 0  # tokens after these whose KV came from where it was offered
    departure: Any = None  # kvtransfer's, once its KV is on its way: this floor only keeps it
    number: int = 0  # of its arrival

    @property
    def id(self) -> str:
        return self.sequence.request.id

    @property
    def fetch_end(self) -> int:
        """Positions before this one are to be fetched, where they are not here."""
        return self.sequence.num_reusable(self.num_offered)

    @property
    def num_expected(self) -> int:
        """Tokens that will be computed, if what is here stays and what is offered comes."""
        held = max(self.sequence.num_computed, self.sequence.num_reusable(max(self.num_here, self.num_offered)))
        return 0 if self.fetch_only else len(self.sequence.tokens) - held


class Scheduler:
    """Jobs that wait, whose prefixes come from elsewhere, and that are being computed. Owned by the step thread.

    A job has all blocks of its prompt from its admission on, so that it can always run to its end. Smaller priorities
    go first, from the next chunk on; within one, the order of arrival holds, however long a prefix was on its way.
    """

    def __init__(self, blocks: BlockManager, *, max_batch_tokens: int, max_running: int, max_waiting: int) -> None:
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._waiting: list[Job] = []  # this and the others are sorted
        self._fetching: list[Job] = []
        self._running: list[Job] = []
        self._numbers = itertools.count()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._fetching)

    @property
    def num_queued_tokens(self) -> int:
        return sum(job.num_expected for job in (*self._waiting, *self._fetching, *self._running))

    def add(self, job: Job) -> None:
        """Raises CapacityError when the queue is full, ContextLengthExceeded when the prompt can never fit."""
        sequence = job.sequence
        if sequence.num_blocks_for(len(sequence.tokens)) > self._blocks.num_blocks:
            room = self._blocks.num_blocks * sequence.block_size
            raise ContextLengthExceeded(
                f"{len(sequence.tokens)} tokens do not fit into a pool of {room}", param="prompt"
            )
        if len(self._waiting) >= self._max_waiting:
            raise CapacityError(f"{len(self._waiting)} prompts are waiting already")
        job.number = next(self._numbers)
        job.num_here = self._blocks.match(sequence.hashes()) * sequence.block_size
        insort(self._waiting, job, key=_turn)

    def remove(self, job: Job) -> None:
        """Take a job out, wherever it is; its blocks stay with the caller."""
        for place in (self._waiting, self._fetching, self._running):
            if job in place:
                place.remove(job)

    def fetch(self) -> list[Job]:
        """Jobs that have their blocks from now on, and of which others hold more: the positions from `num_computed` up
        to `fetch_end` are to be brought into these blocks. Then call `fetched`, or `fetch_failed`.

        That begins before a job's turn to be computed, as soon as there is room for it and for all who came before.
        """
        begun = []
        num_ahead = 0  # blocks for those who came before, at most
        for job in tuple(self._waiting):
            if self.num_running >= self._max_running:
                break
            needed = job.sequence.num_blocks_for(len(job.sequence.tokens))
            if not self._is_offered_more(job) or self._is_on_its_way(job):
                num_ahead += needed
            elif num_ahead + needed <= self._blocks.num_available or not num_ahead:
                if not self._admit(job):
                    break
                self._waiting.remove(job)
                insort(self._fetching, job, key=_turn)
                begun.append(job)
            else:
                break
        return begun

    def fetched(self, job: Job, num_tokens: int) -> None:
        """The KV of the next `num_tokens` positions is in the job's blocks: what is missing yet is computed."""
        self._fetching.remove(job)
        job.num_offered, job.num_fetched = 0, num_tokens
        job.sequence.computed(num_tokens, self._blocks)
        insort(self._running, job, key=_turn)

    def fetch_failed(self, job: Job) -> None:
        """What was offered does not come: the job gives its blocks back, and waits again.

        A block that something may still be written to is the caller's, who has taken it out of the table.
        """
        self._fetching.remove(job)
        job.num_offered = 0
        job.sequence.release(self._blocks)
        insort(self._waiting, job, key=_turn)

    def take_fetched(self) -> list[Job]:
        """Jobs that only fetch, and have got what there is. They are gone from here; their blocks are the caller's."""
        over = [job for job in self._running if job.fetch_only]
        over += [job for job in self._waiting if job.fetch_only and not self._is_offered_more(job)]
        for job in over:
            self.remove(job)
        return over

    def schedule(self) -> list[tuple[Job, int]]:
        """The next step: jobs, and how many tokens of each. Admits what fits."""
        chosen: list[tuple[Job, int]] = []
        budget = self._max_batch_tokens
        for job in self._running:
            if budget:
                chosen.append((job, min(budget, job.sequence.num_missing)))
                budget -= chosen[-1][1]
        for job in tuple(self._waiting):
            if not budget or self.num_running >= self._max_running:
                break
            if self._is_on_its_way(job):
                continue  # others go on meanwhile
            if self._is_offered_more(job) or not self._admit(job):
                break  # there was no room
            self._waiting.remove(job)
            insort(self._running, job, key=_turn)
            chosen.append((job, min(budget, job.sequence.num_missing)))
            budget -= chosen[-1][1]
        return chosen

    def _is_on_its_way(self, job: Job) -> bool:
        """Another job computes or fetches the very block that this one lacks first: it waits, and finds it."""
        others = (other.sequence for other in (*self._running, *self._fetching))
        return job.sequence.is_behind(others, self._blocks)

    def _is_offered_more(self, job: Job) -> bool:
        """More than is here. Once it is not, the offer is forgotten: nothing is fetched behind a gap."""
        if job.num_offered and self._blocks.match(job.sequence.hashes()) * job.sequence.block_size >= job.fetch_end:
            job.num_offered = 0
        return job.num_offered > 0

    def _admit(self, job: Job) -> bool:
        """Give the job its blocks. The last token is always computed, for its logits are wanted."""
        sequence = job.sequence
        num_tokens = len(sequence.tokens)
        reusable = sequence.hashes()[: sequence.num_reusable(num_tokens) // sequence.block_size]
        taken = self._blocks.allocate(reusable, sequence.num_blocks_for(num_tokens))
        if taken is None:
            return False
        sequence.start_with(*taken)
        job.num_here, job.num_cached = 0, sequence.num_computed  # known from now on
        return True


def _turn(job: Job) -> tuple[int, int]:
    return job.sequence.request.priority, job.number
