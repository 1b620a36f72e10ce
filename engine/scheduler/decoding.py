"""Decoding sequences, and the preempted ones that wait for blocks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Set

from engine.kv.block_manager import BlockManager
from engine.scheduler.next_tokens import DecodingRows, NextTokens
from engine.scheduler.sequence import Sequence


class Decoding:
    """Decoding sequences and their preemption. Owned by the step thread.

    Sequences grow block by block. When the pool is empty, the youngest sequence of the tenant holding most blocks is
    preempted: it frees its blocks and recomputes its KV later, often from its own cached blocks. Long answers of one
    tenant therefore do not evict the sequences of tenants with less.
    """

    def __init__(self, blocks: BlockManager, *, max_blocks: int | None = None) -> None:
        """max_blocks: limit of all running sequences while there are several; None: the whole pool."""
        self.running: dict[Sequence, None] = {}  # oldest first
        self.preempted: deque[Sequence] = deque()  # next to resume first
        self.num_preemptions = 0
        self._blocks = blocks
        self._max_blocks = max_blocks
        self._rows = DecodingRows(())  # rows of the last step

    def start(self, sequence: Sequence) -> None:
        """Decode a sequence that has its next token. Without blocks it is queued to recompute its KV first."""
        if not sequence.blocks:
            self.preempted.append(sequence)
        else:
            self.running.setdefault(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove the sequence from either queue; its blocks stay with the caller."""
        self.running.pop(sequence, None)
        if sequence in self.preempted:
            self.preempted.remove(sequence)

    def make_room(self) -> NextTokens:
        """Return the rows of the next step, each with a block for its token.

        Preempts the youngest sequences if blocks run out.
        """
        if self._max_blocks is not None:
            self._limit_blocks(self._max_blocks)
        planned = self._next_tokens(list(self.running))
        if planned.may_include_finished:
            planned = self._next_tokens([one for one in self.running if not (one.num_in_flight and one.ends_with_next)])
        sequences = planned.rows.sequences
        tables = [(sequences[row].blocks, place) for row, place in planned.first_of_blocks]
        if self._blocks.extend_each([table for table, place in tables if len(table) == place]):
            return planned
        return self._next_tokens(self._preempt_until_room(list(sequences)))

    def _next_tokens(self, sequences: list[Sequence]) -> NextTokens:
        # Usually the rows are those of the previous step.
        if sequences != self._rows.sequences:
            self._rows = DecodingRows(sequences)
        return NextTokens(self._rows)

    def _preempt_until_room(self, candidates: list[Sequence]) -> list[Sequence]:
        """Preempt until every remaining sequence has a block for its next token. Return the remaining ones."""
        num_ready = 0
        while num_ready < len(candidates):
            sequence = candidates[num_ready]
            num_tokens, blocks = len(sequence.tokens) + sequence.num_in_flight, sequence.blocks
            if self._blocks.extend(blocks, sequence.num_blocks_for(num_tokens)):
                num_ready += 1
                continue
            victim = _youngest_of_largest(candidates, _blocks_by_tenant(candidates))
            at = candidates.index(victim)
            del candidates[at]
            num_ready -= at < num_ready
            self._preempt(victim)
        return candidates

    def is_poorer(self, tenant: str, num_blocks: int, *, than: Set[str]) -> bool:
        """Return True if the tenant, with `num_blocks` more, would hold no more than each of the tenants in `than`."""
        held = _blocks_by_tenant(self.running)
        return all(held[tenant] + num_blocks <= held[other] for other in than)

    def preempt_for_tenant(self, tenant: str, num_blocks: int, *, num_missing: int, parts_missing: int = 0) -> bool:
        """Preempt sequences of richer tenants to make room for `tenant`, which needs `num_blocks`.

        Frees `num_missing` blocks and `parts_missing` parts of layers with a window. Each victim's tenant keeps at
        least as many blocks as `tenant` would then have. The youngest sequence of the tenant holding most goes first.
        Returns False, and preempts none, if that does not free enough.
        """
        held, victims = _blocks_by_tenant(self.running), list[Sequence]()
        own = held.pop(tenant, 0) + num_blocks
        candidates = [one for one in self.running if one.request.tenant != tenant]
        while (
            sum(one.parts.reserved for one in victims) < parts_missing
            or self._blocks.num_freed_by(one.blocks for one in victims) < num_missing
        ):
            richer = [one for one in candidates if held[one.request.tenant] - len(one.blocks) >= own]
            if not richer:
                return False
            victim = _youngest_of_largest(richer, held)
            victims.append(victim)
            candidates.remove(victim)
            held[victim.request.tenant] -= len(victim.blocks)
        for victim in victims:
            self._preempt(victim)
        return True

    def preempt_for(self, num_missing: int) -> None:
        """Preempt sequences until `num_missing` more blocks are available or none runs.

        The youngest sequence of the tenant holding most blocks goes first.
        """
        victims, candidates = list[Sequence](), list(self.running)
        while candidates and self._blocks.num_freed_by(one.blocks for one in victims) < num_missing:
            victims.append(_youngest_of_largest(candidates, _blocks_by_tenant(candidates)))
            candidates.remove(victims[-1])
        for victim in victims:
            self._preempt(victim)

    def preempt_for_parts(self, num_missing: int) -> None:
        """Preempt as `preempt_for` does, until `num_missing` reserved parts have been returned or no sequence runs."""
        while num_missing > 0 and self.running:
            victim = _youngest_of_largest(list(self.running), _blocks_by_tenant(self.running))
            num_missing -= victim.parts.reserved
            self._preempt(victim)

    def _limit_blocks(self, max_blocks: int) -> None:
        num_blocks = sum(len(sequence.blocks) for sequence in self.running)
        while num_blocks > max_blocks and len(self.running) > 1:
            running = list(self.running)
            victim = _youngest_of_largest(running, _blocks_by_tenant(running))
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


def _youngest_of_largest(sequences: list[Sequence], held: Counter[str]) -> Sequence:
    """Return the youngest sequence of the tenant holding most blocks.

    sequences: oldest first. held: blocks by tenant.
    """
    most = max(held[sequence.request.tenant] for sequence in sequences)
    return next(sequence for sequence in reversed(sequences) if held[sequence.request.tenant] == most)
