"""Replay of a trace against block managers with state slots. Nothing is computed, and prompts take no time.

A sequence holds its blocks and its slot from its arrival until it has generated its answer at a fixed pace.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from core.trace.trace import TraceRequest
from core.types.errors import SpecError
from core.types.request import SequenceRequest
from engine.kv.block_manager import BlockManager
from engine.kv.eviction import make_eviction
from engine.scheduler.prompts import allocate
from engine.scheduler.sequence import Sequence as EngineSequence

# Tokens of a prompt per step.
_CHUNK_TOKENS = 8192


@dataclass(frozen=True)
class Rule:
    """Positions of checkpoints, in addition to the end of a prompt's last full block.

    has_sight: also where the prompt's cached blocks end. has_answers: also every StateManager.interval tokens of an
    answer. every: also at all multiples of this many tokens of a prompt. is_free: states take no memory, and every
    block has one.
    """

    has_sight: bool = False
    has_answers: bool = False
    every: int = 0
    is_free: bool = False

    @classmethod
    def parse(cls, name: str, *, block_size: int) -> Self:
        """Parse names such as `end`, `sight+answers`, `2048` and `free`. Raises SpecError."""
        parts = name.split("+")
        numbers = [int(part) for part in parts if part.isdecimal()]
        if set(parts) - {"end", "sight", "answers", "free", *map(str, numbers)} or len(numbers) > 1:
            raise SpecError(f"--rules {name}: join some of end, sight, answers, free and one number of tokens with +")
        if any(number < 1 or number % block_size for number in numbers):
            raise SpecError(f"--rules {name}: checkpoints are at multiples of the block size, {block_size} tokens")
        return cls("sight" in parts, "answers" in parts, sum(numbers), "free" in parts)


@dataclass
class Tally:
    """Counts of one replay. A checkpoint that the answer's next one replaces is not counted as evicted."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    checkpoints: int = 0
    evicted: int = 0
    # Distinct checkpoints from which prompts continued.
    used: int = 0


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Sizes of a replica's pool, and its pace."""

    num_blocks: int
    num_states: int
    block_size: int
    # Seconds between two tokens of an answer.
    token_s: float


def replay(
    trace: Sequence[TraceRequest], hashes: Sequence[list[bytes]], chosen: Sequence[int], rule: Rule, pool: Pool
) -> Tally:
    """Return the counts of all replicas after the last arrival. chosen: each request's replica."""
    tally = Tally()
    replicas = [Replica(pool, rule, tally) for _ in range(max(chosen) + 1)]
    for request, own, number in zip(trace, hashes, chosen, strict=True):
        replicas[number].answer(request, own)
    return tally


def routes(trace: Sequence[TraceRequest], num_replicas: int) -> list[int]:
    """Return each request's replica: that with its longest prefix of two or more ids, else that with fewest tokens.

    Evictions do not change routes, so all rules get the same ones.
    """
    loads, replica_of, chosen = Counter(dict.fromkeys(range(num_replicas), 0)), dict[int, int](), list[int]()
    for request in trace:
        known = [replica_of[id] for id in (request.ids or ())[1:] if id in replica_of]
        replica = known[-1] if known else min(loads, key=lambda one: loads[one])
        loads[replica] += request.num_tokens
        replica_of.update(dict.fromkeys(request.ids or (), replica))
        chosen.append(replica)
    return chosen


class Replica:
    """Block manager of one replica, and the sequences that it runs."""

    def __init__(self, pool: Pool, rule: Rule, tally: Tally) -> None:
        self._now = 0.0
        eviction = make_eviction("reuse_value", num_blocks=pool.num_blocks, clock=lambda: self._now)
        self._blocks = BlockManager(pool.num_blocks, eviction, num_states=pool.num_states)
        self._pool, self._rule, self._tally = pool, rule, tally
        self._used: set[bytes] = set()
        # Ends of answers, request numbers, sequences, and lengths of answers.
        self._running: list[tuple[float, int, EngineSequence, int]] = []

    def answer(self, request: TraceRequest, hashes: Iterable[bytes]) -> None:
        """Compute a prompt, and start its answer. If the pool is full, running answers end early."""
        while self._running and self._running[0][0] <= request.arrival_s:
            self._finish()
        self._now, num_tokens = request.arrival_s, request.num_tokens
        asked = SequenceRequest(id="", token_ids=(0,) * num_tokens, num_prompt_tokens=num_tokens)
        most_tokens = num_tokens + request.num_output
        sequence = EngineSequence(
            asked, 0, model="", block_size=self._pool.block_size, max_context=most_tokens, hashes=hashes
        )
        self._tally.prompt_tokens += num_tokens
        while not allocate(sequence, self._blocks, room=request.num_output):
            if not self._running:
                return
            self._finish()
        self._tally.reused_tokens += sequence.num_computed
        self._compute_prompt(sequence)
        ends_s = request.arrival_s + request.num_output * self._pool.token_s
        heapq.heappush(self._running, (ends_s, request.number, sequence, request.num_output))

    def _compute_prompt(self, sequence: EngineSequence) -> None:
        states, rule, start = self._blocks.states, self._rule, sequence.num_computed
        if states:
            if start and (last := sequence.hashes()[start // self._pool.block_size - 1]) not in self._used:
                self._used.add(last)
                self._tally.used += 1
            end = sequence.num_reusable(len(sequence.tokens))
            planned = {end, *(range(rule.every, end, rule.every) if rule.every else ())}
            planned.update(sequence.checkpoints_at if rule.has_sight else ())
            sequence.checkpoints_at = sorted(position for position in planned if position > start)
        while num_tokens := min(sequence.num_missing, _CHUNK_TOKENS):
            if states:
                sequence.checkpoint_state(states)
                sequence.take_checkpoint_slots(num_tokens, states)
            sequence.computed(num_tokens, self._blocks)
            self._count()

    def _finish(self) -> None:
        """Generate the answer that ends first, and free its blocks."""
        ends_s, _, sequence, num_output = heapq.heappop(self._running)
        self._now = max(self._now, ends_s)
        states = self._blocks.states if self._rule.has_answers else None
        sequence.tokens.extend([0] * num_output)
        replaced = -1
        while (num_tokens := sequence.num_missing - 1) > 0:
            if states:
                sequence.checkpoint_state(states)
                replaced += self._count()
                num_tokens = min(num_tokens, sequence.checkpoints_at[0] - sequence.num_computed)
            sequence.computed(num_tokens, self._blocks)
        self._tally.evicted -= max(0, replaced)
        sequence.release(self._blocks)

    def _count(self) -> int:
        """Count the checkpoints made and dropped since the last call. Returns the number made."""
        changes = self._blocks.states.take_changes().values() if self._blocks.states else ()
        self._tally.checkpoints += sum(changes)
        self._tally.evicted += len(changes) - sum(changes)
        return sum(changes)
