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
    # Slots that the step writes beside the sequence's own, if the model has recurrent layers: slot i gets the state
    # after i draft tokens. The own slot gets the state after all of them.
    state_slots: Seq[int] = ()
    first_logits: int = field(default=-1, init=False)  # index of the row's first logits; set when the step is laid out

    def num_right(self, chosen: Seq[int]) -> int:
        """Return how many leading tokens equal the chosen ones."""
        pairs = zip(self.tokens, chosen, strict=False)
        most = min(len(self.tokens), len(chosen))
        return next((i for i, (token, other) in enumerate(pairs) if token != other), most)

    def give_back(self, sequence: Sequence, blocks: BlockManager, *, num_right: int) -> None:
        """Free the blocks of rejected tokens, and go back to the state after the last of `num_right` accepted ones.

        A state before it may become a checkpoint.
        """
        if self.state_slots and blocks.states:
            slots = [*self.state_slots, sequence.state_slots[0]]
            sequence.use_state(slots.pop(num_right), blocks.states)
            passed = slots[:num_right]
            sequence.keep_passed(passed, blocks.states)
            blocks.free(passed + slots[num_right:])
        kept = max(self.num_blocks, sequence.num_blocks_for(sequence.num_computed))
        if blocks.windows:
            sequence.parts.trim(kept, blocks.windows)
        blocks.free(sequence.blocks[kept:])
        del sequence.blocks[kept:]


def take_room(sequence: Sequence, num_tokens: int, blocks: BlockManager) -> int:
    """Allocate blocks for up to num_tokens draft tokens. Returns for how many; takes no block of another sequence."""
    if blocks.states:
        num_tokens = min(num_tokens, blocks.states.num_available)
    if not blocks.extend(sequence.blocks, sequence.num_blocks_for(len(sequence.tokens) + num_tokens)):
        num_tokens = len(sequence.blocks) * sequence.block_size - len(sequence.tokens)
    return num_tokens


def take_state_slots(sequence: Sequence, num_tokens: int, blocks: BlockManager) -> list[int]:
    """Take the state slots of a draft of `num_tokens` tokens, and add them to the sequence's."""
    slots = [blocks.states.take() for _ in range(num_tokens)] if blocks.states else []
    sequence.state_slots += slots
    return slots
