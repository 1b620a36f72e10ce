"""Tokens that are known before anything is computed, as those that a grammar forces: they enter a sequence at once, and
their KV is computed together with that of the token before them.

They are asked for one by one (SamplingRow.known_token), and are those that steps would choose one by one. Between two
steps a sequence lacks the KV of its last token and no other, as if it had none: whoever moves, forks or preempts it
need not know of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.types.request import SampledToken
from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence

MAX_KNOWN = 32  # of a sequence and step, for others wait for what it computes


def take_known(sequences: Iterable[Sequence], budget: int, blocks: BlockManager) -> list[tuple[Sequence, SampledToken]]:
    """Append up to `budget` tokens to sequences that are about to compute their last ones, the first ones first. No
    other loses a block for them.

    Returns them in order. One may be the last of its sequence, which has nothing to compute then.
    """
    known: list[tuple[Sequence, SampledToken]] = []
    for sequence in sequences:
        if not sequence.sampling_row.may_be_known:  # mostly
            continue
        most = min(MAX_KNOWN, budget - len(known), sequence.most_tokens - len(sequence.tokens))
        for _ in range(most):
            token_id = sequence.sampling_row.known_token()
            if token_id is None or not take_room(sequence, blocks):
                break
            token = sequence.append(token_id)
            known.append((sequence, token))
            if token.finish_reason:
                break
    return known


def take_room(sequence: Sequence, blocks: BlockManager) -> bool:
    """For the KV of one token more. False, taking nothing, if there is none."""
    return blocks.extend(sequence.blocks, sequence.num_blocks_for(len(sequence.tokens) + 1))
