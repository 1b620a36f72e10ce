"""A sequence and its draft, once there are logits: what is drawn, token by token, as far as the draft is right.

A draft of d tokens behind a sequence of n:

    computed     token n - 1    draft 0      draft 1      ...      draft d - 1
    chosen            n          n + 1        n + 2                   n + d         position, of seed and draw

The token chosen for position n is the sequence's next one, whatever was drafted. Where it is draft 0, the one that was
chosen behind that follows it, and so on: every token is drawn as it would have been without a draft, by what was asked
of it then. So answers are token for token the same, at any temperature.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TypeVar

from cluster.words.request import SampledToken
from engine.kv.block_manager import BlockManager
from engine.sampling import Chosen, Sampler
from engine.sequence import Sequence
from engine.speculation.draft import Draft

Logits = TypeVar("Logits")


def verify(
    draft: Draft, sequence: Sequence, num_tokens: int, choices: Iterator[Chosen | None], blocks: BlockManager
) -> tuple[list[SampledToken], bool]:
    """Append what was chosen behind the sequence's own tokens, and behind those of the draft that are right; book the
    KV of what the sequence has then, but for its last token, and give the blocks of the rest back.

    num_tokens: of its own that the step has computed. choices: see `choices_of`. Returns the tokens, and False where
    there was none to choose after them.
    """
    tokens: list[SampledToken] = []
    is_found = True
    for drafted, choice in zip((*draft.tokens, None), choices, strict=True):
        if choice is None:
            is_found = False
            break
        tokens.append(sequence.append(*choice))
        if tokens[-1].finish_reason or tokens[-1].token_id != drafted:
            break
    sequence.computed(num_tokens + len(tokens) - is_found, blocks)
    draft.give_back(sequence, blocks)
    return tokens, is_found


def choices_of(
    draft: Draft,
    sequence: Sequence,
    chosen: Iterator[Chosen | None],
    sampler: Sampler[Logits],
    logits: Logits,
) -> Iterator[Chosen | None]:
    """What is chosen behind the sequence's own tokens, then behind each of the draft, in turn. Whoever asks for one
    has appended those before.

    chosen: what the sampler has chosen for the rows of this step, from here on; the row's own are taken from it.
    """
    first = next(chosen)
    if sequence.sampling_row.goes_one_by_one(len(draft.tokens)):
        return chain((first,), _one_by_one(draft, sequence, sampler, logits))
    behind: Iterable[Chosen | None] = [next(chosen) for _ in draft.tokens]
    return chain((first,), behind)


def _one_by_one(draft: Draft, sequence: Sequence, sampler: Sampler[Logits], logits: Logits) -> Iterator[Chosen | None]:
    for place in range(1, len(draft.tokens) + 1):
        yield sampler(logits, [sequence.sampling_row], [draft.first_logits + place]).wait()[0]
