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
        self.running: list[Sequence] = []  # oldest first
        self.preempted: deque[Sequence] = deque()  # those that go on first come first
        self.num_preemptions = 0
        self._blocks = blocks

    def start(self, sequence: Sequence) -> None:
        """It has its next token. It decodes from now on; without blocks, it first computes its KV again."""
        if not sequence.blocks:
            self.preempted.append(sequence)
        elif sequence not in self.running:
            self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take it out, wherever it is; its blocks stay with the caller."""
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence in self.preempted:
            self.preempted.remove(sequence)

    def make_room(self) -> list[Sequence]:
        """Those that run, each with a block for its next token; the youngest are preempted where that needs it."""
        running, num_kept = self.running, 0
        while num_kept < len(running):
            sequence = running[num_kept]
            num_tokens, blocks = len(sequence.tokens), sequence.blocks
            if num_tokens <= len(blocks) * sequence.block_size or self._blocks.extend(
                blocks, sequence.num_blocks_for(num_tokens)
            ):
                num_kept += 1
                continue
            victim = running.pop()
            victim.release(self._blocks)
            self.preempted.appendleft(victim)
            self.num_preemptions += 1
        return list(running)
