"""Verification of drafts against the logits of a step.

A draft of d tokens behind a sequence of n:

    computed     token n - 1    draft 0      draft 1      ...      draft d - 1
    chosen            n          n + 1        n + 2                   n + d         position, of seed and draw

The token chosen for position n is the sequence's next one, whatever the draft. If it equals draft 0, the token chosen
behind draft 0 follows it, and so on. A draw is a function of seed and position, so every token is the one that would
have been chosen without a draft: answers are identical token for token, at any temperature, without
rejection probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from core.types.request import SampledToken
from engine.kv.block_manager import BlockManager
from engine.sampling.params import Chosen, Sampler
from engine.scheduler.sequence import Sequence
from engine.spec_decode.draft import Draft

Logits = TypeVar("Logits")

# Returns the token chosen behind `place` tokens of the draft. The caller has appended those tokens.
Choose = Callable[[int], Chosen | None]


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
    draft: Draft,
    sequence: Sequence,
    chosen: Iterator[Chosen | None],
    sampler: Sampler[Logits],
    logits: Logits,
) -> Choose:
    """Return the choices of one row. chosen: the sampler's output of the step; the row's entries are consumed."""
    first, row = next(chosen), sequence.sampling_row
    if row.is_sequential(len(draft.tokens)):

        def choose(place: int) -> Chosen | None:
            return sampler(logits, [row], [draft.first_logits + place]).wait()[0] if place else first

        return choose
    return [first, *(next(chosen) for _ in draft.tokens)].__getitem__
