"""Sequences that decode, and those that must wait for blocks to go on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Set

from engine.kv.block_manager import BlockManager
from engine.scheduler.next_tokens import DecodingRows, NextTokens
from engine.scheduler.sequence import Sequence


class Decoding:
    """Owned by the step thread.

    Sequences grow block by block. When none is left, the youngest of the tenant that has most of them is preempted: it
    gives its blocks back and later computes its KV again (often from the cache, where its own blocks still lie). So
    whoever asks for long answers takes nothing from those who have less.
    """

    def __init__(self, blocks: BlockManager, *, max_blocks: int | None = None) -> None:
        """max_blocks: of all that run, while there are several; None: the pool is theirs."""
        self.running: dict[Sequence, None] = {}  # oldest first
        self.preempted: deque[Sequence] = deque()  # those that go on first come first
        self.num_preemptions = 0
        self._blocks = blocks
        self._max_blocks = max_blocks
        self._rows = DecodingRows(())  # of the last step

    def start(self, sequence: Sequence) -> None:
        """It has its next token. It decodes from now on; without blocks, it first computes its KV again."""
        if not sequence.blocks:
            self.preempted.append(sequence)
        else:
            self.running.setdefault(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take it out, wherever it is; its blocks stay with the caller."""
        self.running.pop(sequence, None)
        if sequence in self.preempted:
            self.preempted.remove(sequence)

    def make_room(self) -> NextTokens:
        """Of those that go on, each with a block for it; the youngest are preempted where that needs it."""
        if self._max_blocks is not None:
            self._keep_to(self._max_blocks)
        planned = self._next_tokens(list(self.running))
        if planned.may_be_over:
            planned = self._next_tokens([one for one in self.running if not (one.num_in_flight and one.ends_with_next)])
        sequences = planned.rows.sequences
        tables = [(sequences[row].blocks, place) for row, place in planned.first_of_blocks]
        if self._blocks.extend_each([table for table, place in tables if len(table) == place]):
            return planned
        return self._next_tokens(self._preempt_for_room(list(sequences)))

    def _next_tokens(self, sequences: list[Sequence]) -> NextTokens:
        if sequences != self._rows.sequences:  # mostly, they are those of the step before
            self._rows = DecodingRows(sequences)
        return NextTokens(self._rows)

    def _preempt_for_room(self, kept: list[Sequence]) -> list[Sequence]:
        """Those that are left, each with a block for its next token."""
        num_kept = 0
        while num_kept < len(kept):
            sequence = kept[num_kept]
            num_tokens, blocks = len(sequence.tokens) + sequence.num_in_flight, sequence.blocks
            if self._blocks.extend(blocks, sequence.num_blocks_for(num_tokens)):
                num_kept += 1
                continue
            victim = _youngest_of_most(kept, _blocks_by_tenant(kept))
            at = kept.index(victim)
            del kept[at]
            num_kept -= at < num_kept
            self._preempt(victim)
        return kept

    def is_poorer(self, tenant: str, num_blocks: int, *, than: Set[str]) -> bool:
        """Whether with so many blocks more it would have no more than each of these others has."""
        held = _blocks_by_tenant(self.running)
        return all(held[tenant] + num_blocks <= held[other] for other in than)

    def make_way(self, tenant: str, num_blocks: int, *, num_missing: int) -> bool:
        """See that so many blocks more are available for a tenant that wants `num_blocks`, if they can be taken from
        tenants who then still have as many as it would have; the youngest of whoever has most first."""
        held, victims = _blocks_by_tenant(self.running), list[Sequence]()
        own = held.pop(tenant, 0) + num_blocks
        candidates = [one for one in self.running if one.request.tenant != tenant]
        is_enough = num_missing <= 0
        while not is_enough:
            richer = [one for one in candidates if held[one.request.tenant] - len(one.blocks) >= own]
            if not richer:
                return False
            victim = _youngest_of_most(richer, held)
            victims.append(victim)
            candidates.remove(victim)
            held[victim.request.tenant] -= len(victim.blocks)
            is_enough = self._blocks.num_freed_by(one.blocks for one in victims) >= num_missing
        for victim in victims:
            self._preempt(victim)
        return True

    def give_way(self, num_missing: int) -> None:
        """See that so many blocks more are available, as far as those that run have them; the youngest of whoever has
        most first."""
        victims, candidates = list[Sequence](), list(self.running)
        while candidates and self._blocks.num_freed_by(one.blocks for one in victims) < num_missing:
            victims.append(_youngest_of_most(candidates, _blocks_by_tenant(candidates)))
            candidates.remove(victims[-1])
        for victim in victims:
            self._preempt(victim)

    def _keep_to(self, max_blocks: int) -> None:
        num_blocks = sum(len(sequence.blocks) for sequence in self.running)
        while num_blocks > max_blocks and len(self.running) > 1:
            running = list(self.running)
            victim = _youngest_of_most(running, _blocks_by_tenant(running))
            num_blocks -= len(victim.blocks)
            self._preempt(victim)

    def _preempt(self, victim: Sequence) -> None:
        del self.running[victim]
        victim.release(self._blocks)
        self.preempted.appendleft(victim)
        self.num_preemptions += 1


def _blocks_by_tenant(sequences: Iterable[Sequence]) -> Counter[str]:
    held = Counter[str]()
    for sequence in sequences:
        held[sequence.request.tenant] += len(sequence.blocks)
    return held


def _youngest_of_most(sequences: list[Sequence], held: Counter[str]) -> Sequence:
    """sequences: oldest first. held: blocks by tenant."""
    most = max(held[sequence.request.tenant] for sequence in sequences)
    return next(sequence for sequence in reversed(sequences) if held[sequence.request.tenant] == most)
