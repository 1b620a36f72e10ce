"""Tokens that a step computes behind those of a sequence, though nobody knows yet whether they are its next ones."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile

from engine.kv.block_manager import BlockManager
from engine.sequence import Sequence


@dataclass(eq=False, slots=True, kw_only=True)
class Draft:
    """Of one row of one step."""

    tokens: Seq[int]
    num_blocks: int  # that the sequence had before
    method: str = ""
    first_logits: int = field(default=-1, init=False)  # where the row's logits begin, once somebody has counted

    def num_right(self, chosen: Seq[int]) -> int:
        """Leading tokens of it that are what was chosen."""
        pairs = zip(self.tokens, chosen, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def give_back(self, sequence: Sequence, blocks: BlockManager) -> None:
        """The blocks that were taken for what has turned out to be wrong."""
        kept = max(self.num_blocks, sequence.num_blocks_for(sequence.num_computed))
        blocks.free(sequence.blocks[kept:])
        del sequence.blocks[kept:]


def take_room(sequence: Sequence, num_tokens: int, blocks: BlockManager) -> int:
    """For the KV of so many drafted tokens, or of as many as there is room for. No other sequence loses a block."""
    if not blocks.extend(sequence.blocks, sequence.num_blocks_for(len(sequence.tokens) + num_tokens)):
        num_tokens = len(sequence.blocks) * sequence.block_size - len(sequence.tokens)
    return num_tokens
