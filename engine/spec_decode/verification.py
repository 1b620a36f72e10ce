"""Verification of drafts against the logits of a step.

A draft of d tokens behind a sequence of n:

    computed     token n - 1    draft 0      draft 1      ...      draft d - 1
    chosen            n          n + 1        n + 2                   n + d         position, of seed and draw

The token chosen for position n is the sequence's next one, whatever the draft. If it equals draft 0, the token chosen
behind draft 0 follows it, and so on. A draw is a function of seed and position, so every token is the one that would
have been chosen without a draft: answers are identical token for token, at any temperature. If the chosen token begins
a branch instead, verification continues in that branch. At most one candidate of a place can be right, so no rejection
probabilities are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from core.types.request import SampledToken
from engine.kv.block_manager import BlockManager
from engine.sampling.params import Chosen, Sampler
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft import Branch, Draft

Logits = TypeVar("Logits")

# Returns the token chosen behind `place` tokens of the draft, or of a branch. The caller has appended those tokens.
Choose = Callable[[Branch | None, int], Chosen | None]


def verify(
    draft: Draft, sequence: Sequence, num_tokens: int, choose: Choose, blocks: BlockManager
) -> tuple[list[SampledToken], bool]:
    """Append the accepted tokens and the one after them, record their KV, and free the blocks of rejected tokens.

    num_tokens: the sequence's own tokens that the step has computed. choose: see `choices_of`. Returns the tokens, and
    False if no token could be chosen after them.
    """
    tokens: list[SampledToken] = []
    branch: Branch | None = None
    place, is_found = 0, True
    while True:
        choice = choose(branch, place)
        if choice is None:
            is_found = False
            break
        tokens.append(sequence.append(*choice))
        token_id = tokens[-1].token_id
        if tokens[-1].finish_reason:
            break
        expected = branch.tokens if branch else draft.tokens
        if place < len(expected) and expected[place] == token_id:
            place += 1
        elif branch is None and (branch := draft.branch_at(place, token_id)):
            place = 1
        else:
            break
    if branch:
        branch.take_over(sequence)
    sequence.computed(num_tokens + len(tokens) - is_found, blocks)
    draft.give_back(sequence, blocks)
    return tokens, is_found


def choices_of(
    draft: Draft,
    sequence: Sequence,
    chosen: Iterator[Chosen | None],
    sampler: Sampler[Logits],
    logits: Logits,
) -> Choose:
    """Return the choices of one row. chosen: the sampler's output of the step; the row's entries are consumed."""
    first, row = next(chosen), sequence.sampling_row
    if row.is_sequential(draft.depth):

        def choose(branch: Branch | None, place: int) -> Chosen | None:
            if branch is None and place == 0:
                return first
            at = branch.first_logits + place - 1 if branch else draft.first_logits + place
            return sampler(logits, [row], [at]).wait()[0]

        return choose
    behind = [first, *(next(chosen) for _ in draft.tokens)]
    others = {branch: [next(chosen) for _ in branch.tokens] for branch in draft.branches}
    return lambda branch, place: others[branch][place - 1] if branch else behind[place]
