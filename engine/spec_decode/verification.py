"""A sequence and its draft, once there are logits: what is drawn, token by token, as far as the draft is right.

A draft of d tokens behind a sequence of n:

    computed     token n - 1    draft 0      draft 1      ...      draft d - 1
    chosen            n          n + 1        n + 2                   n + d         position, of seed and draw

The token chosen for position n is the sequence's next one, whatever was drafted. Where it is draft 0, the one that was
chosen behind that follows it, and so on: every token is drawn as it would have been without a draft, by what was asked
of it then. So answers are token for token the same, at any temperature. Where it is not the draft's token but that with
which a branch begins, what follows is chosen behind that branch's tokens instead. A draw has one outcome: of all that
stand at one place at most one is right, and nothing has to be weighed against anything.
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

# What is chosen behind so many tokens of a draft; or of a branch of it, and what is before that. Whoever asks has
# appended those.
Choose = Callable[[Branch | None, int], Chosen | None]


def verify(
    draft: Draft, sequence: Sequence, num_tokens: int, choose: Choose, blocks: BlockManager
) -> tuple[list[SampledToken], bool]:
    """Append what was chosen behind the sequence's own tokens, and behind those of the draft that are right; book the
    KV of what the sequence has then, but for its last token, and give the blocks of the rest back.

    num_tokens: of its own that the step has computed. choose: see `choices_of`. Returns the tokens, and False where
    there was none to choose after them.
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
    """chosen: what the sampler has chosen for the rows of this step, from here on; the row's own are taken from it."""
    first, row = next(chosen), sequence.sampling_row
    if row.goes_one_by_one(draft.depth):

        def choose(branch: Branch | None, place: int) -> Chosen | None:
            if branch is None and place == 0:
                return first
            at = branch.first_logits + place - 1 if branch else draft.first_logits + place
            return sampler(logits, [row], [at]).wait()[0]

        return choose
    behind = [first, *(next(chosen) for _ in draft.tokens)]
    others = {branch: [next(chosen) for _ in branch.tokens] for branch in draft.branches}
    return lambda branch, place: others[branch][place - 1] if branch else behind[place]
