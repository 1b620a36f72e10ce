"""Drafts of a step, and their verification: which drafted tokens are accepted.

A step computes a draft's tokens behind those of its sequence, before they are known to be the next ones. A draft of d
tokens behind a sequence of n:

    computed     token n - 1    draft 0      draft 1      ...      draft d - 1
    chosen            n          n + 1        n + 2                   n + d         position, of seed and draw

The token chosen for position n is the sequence's next one, whatever the draft. If it equals draft 0, the token chosen
behind draft 0 follows it, and so on. A draw is a function of seed and position, so every token is the one that would
have been chosen without a draft: answers are identical token for token, at any temperature, without
rejection probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeVar

from core.types.request import SampledToken
from engine.kv.block_manager import BlockManager
from engine.sampling.params import Chosen, Sampler
from engine.scheduler.sequence import Sequence

Logits = TypeVar("Logits")

# Returns the token chosen behind `place` tokens of the draft. The caller has appended those tokens.
Choose = Callable[[int], Chosen | None]


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

        An earlier state may become a checkpoint.
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
    """Allocate blocks for up to num_tokens draft tokens. Returns how many got room; takes no other sequence's block."""
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


def verify(
    draft: Draft, sequence: Sequence, num_tokens: int, choose: Choose, blocks: BlockManager
) -> tuple[list[SampledToken], bool]:
    """Append the accepted tokens and the one after them, record their KV, and free the blocks of rejected tokens.

    num_tokens: the sequence's own tokens that the step has computed. choose: see `choices_of`. Returns the tokens, and
    False if no token could be chosen after them.
    """
    tokens: list[SampledToken] = []
    while (choice := choose(len(tokens))) is not None:
        place = len(tokens)
        tokens.append(sequence.append(*choice))
        is_right = place < len(draft.tokens) and draft.tokens[place] == tokens[-1].token_id
        if tokens[-1].finish_reason or not is_right:
            break
    is_found = choice is not None
    sequence.computed(num_tokens + len(tokens) - is_found, blocks)
    draft.give_back(sequence, blocks, num_right=len(tokens) - is_found)
    return tokens, is_found


def choices_of(
    draft: Draft, sequence: Sequence, chosen: Iterator[Chosen | None], sampler: Sampler[Logits], logits: Logits
) -> Choose:
    """Return one row's Choose function, which consumes the row's entries of `chosen`, the sampler's output."""
    first, row = next(chosen), sequence.sampling_row
    if row.is_sequential(len(draft.tokens)):

        def choose(place: int) -> Chosen | None:
            return sampler(logits, [row], [draft.first_logits + place]).wait()[0] if place else first

        return choose
    return [first, *(next(chosen) for _ in draft.tokens)].__getitem__
