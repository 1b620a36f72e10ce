"""Draft: tokens that a step computes behind those of a sequence, before they are known to be the next ones."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence


@dataclass(eq=False, slots=True, kw_only=True)
class Draft:
    """Draft of one row of one step."""

    tokens: Seq[int]
    num_blocks: int  # of the sequence, before the draft
    method: str = ""
    first_logits: int = field(default=-1, init=False)  # index of the row's first logits; set when the step is laid out

    def num_right(self, chosen: Seq[int]) -> int:
        """Return how many leading tokens equal the chosen ones."""
        pairs = zip(self.tokens, chosen, strict=False)
        most = min(len(self.tokens), len(chosen))
        return next((i for i, (token, other) in enumerate(pairs) if token != other), most)

    def give_back(self, sequence: Sequence, blocks: BlockManager) -> None:
        """Free the blocks of rejected tokens."""
        kept = max(self.num_blocks, sequence.num_blocks_for(sequence.num_computed))
        blocks.free(sequence.blocks[kept:])
        del sequence.blocks[kept:]


def take_room(sequence: Sequence, num_tokens: int, blocks: BlockManager) -> int:
    """Allocate blocks for up to num_tokens draft tokens. Returns for how many; takes no block of another sequence."""
    if not blocks.extend(sequence.blocks, sequence.num_blocks_for(len(sequence.tokens) + num_tokens)):
        num_tokens = len(sequence.blocks) * sequence.block_size - len(sequence.tokens)
    return num_tokens
