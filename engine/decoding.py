"""Sequences that decode, and those that must wait for blocks to go on."""

from __future__ import annotations

from collections import deque

from engine.kv.block_manager import BlockManager
from engine.sequence import Sequence


class Decoding:
    """Owned by the step thread.

    Sequences grow block by block. When none is left, the youngest is preempted: it gives its blocks back and later
    computes its KV again (often from the cache, where its own blocks still lie).
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.running: dict[Sequence, None] = {}  # oldest first
        self.preempted: deque[Sequence] = deque()  # those that go on first come first
        self.num_preemptions = 0
        self._blocks = blocks

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

    def make_room(self) -> list[Sequence]:
        """Those that run, each with a block for its next token; the youngest are preempted where that needs it."""
        kept, num_kept = list(self.running), 0
        while num_kept < len(kept):
            sequence = kept[num_kept]
            num_tokens, blocks = len(sequence.tokens), sequence.blocks
            has_room = num_tokens <= len(blocks) * sequence.block_size  # mostly
            if has_room or self._blocks.extend(blocks, sequence.num_blocks_for(num_tokens)):
                num_kept += 1
                continue
            victim = kept.pop()
            del self.running[victim]
            victim.release(self._blocks)
            self.preempted.appendleft(victim)
            self.num_preemptions += 1
        return kept
