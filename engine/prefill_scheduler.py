"""Which prompts are computed in the next step: first come, first served, in chunks."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import Any

from cluster.errors import CapacityError, ContextLengthExceeded
from cluster.handoff import Handoff
from engine.block_manager import BlockManager
from engine.sequence import Sequence


@dataclass(eq=False)
class Job:
    """One prompt to compute, and where its KV goes. `handoff` is None when only the first tokens are wanted."""

    sequence: Sequence
    handoff: Handoff | None
    num_cached: int = 0  # tokens found in the prefix cache when it was admitted
    departure: Any = None  # kvtransfer's, once its KV is on its way: this floor only keeps it

    @property
    def id(self) -> str:
        return self.sequence.request.id


class Scheduler:
    """Waiting jobs, and jobs whose prompts are being computed. Owned by the step thread.

    A job has all blocks of its prompt from its admission on, so that it can always run to its end. Smaller priorities
    go first, from the next chunk on; within one, the order of arrival holds.
    """

    def __init__(self, blocks: BlockManager, *, max_batch_tokens: int, max_running: int, max_waiting: int) -> None:
        self._blocks = blocks
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_queued_tokens(self) -> int:
        return sum(job.sequence.num_missing for job in (*self._waiting, *self._running))

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
        place = len(self._waiting)
        while place and self._waiting[place - 1].sequence.request.priority > sequence.request.priority:
            place -= 1
        self._waiting.insert(place, job)

    def remove(self, job: Job) -> None:
        """Take a job out, wherever it is; its blocks stay with the caller."""
        if job in self._waiting:
            self._waiting.remove(job)
        elif job in self._running:
            self._running.remove(job)

    def schedule(self) -> list[tuple[Job, int]]:
        """The next step: jobs, and how many tokens of each. Admits what fits."""
        chosen: list[tuple[Job, int]] = []
        budget = self._max_batch_tokens
        for job in self._running:
            if budget:
                chosen.append((job, min(budget, job.sequence.num_missing)))
                budget -= chosen[-1][1]
        while budget and self._waiting and len(self._running) < self._max_running:
            if self._is_on_its_way(self._waiting[0]) or not self._admit(self._waiting[0]):
                break
            job = self._waiting.popleft()
            insort(self._running, job, key=_priority)
            chosen.append((job, min(budget, job.sequence.num_missing)))
            budget -= chosen[-1][1]
        return chosen

    def _is_on_its_way(self, job: Job) -> bool:
        """A running job computes the very block that this one lacks first: it waits, and finds it."""
        return job.sequence.is_behind((other.sequence for other in self._running), self._blocks)

    def _admit(self, job: Job) -> bool:
        """Give the job its blocks. The last token is always computed, for its logits are wanted."""
        sequence = job.sequence
        num_tokens = len(sequence.tokens)
        reusable = sequence.hashes()[: (num_tokens - 1) // sequence.block_size]
        taken = self._blocks.allocate(reusable, sequence.num_blocks_for(num_tokens))
        if taken is None:
            return False
        sequence.start_with(*taken)
        job.num_cached = sequence.num_computed
        return True


def _priority(job: Job) -> int:
    return job.sequence.request.priority
