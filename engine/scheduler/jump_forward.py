"""Jump-forward decoding: tokens that a grammar forces are appended without a forward pass.

Their KV is computed together with that of the token before them. `SamplingRow.known_token` returns them one by one, and
they equal the tokens that steps would choose. Between two steps a sequence lacks the KV of its last token only, so
moving, forking and preempting need no special case.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.types.request import SampledToken
from engine.kv.block_manager import BlockManager
from engine.scheduler.sequence import Sequence

# Per sequence and step, because other rows wait for the computation.
MAX_KNOWN = 32


def append_forced(
    sequences: Iterable[Sequence], budget: int, blocks: BlockManager
) -> list[tuple[Sequence, SampledToken]]:
    """Append up to `budget` forced tokens, sequence by sequence. Each sequence is about to compute its last token.

    Never preempts to make room. Returns the tokens in order. A sequence that a forced token finishes gets no row.
    """
    known: list[tuple[Sequence, SampledToken]] = []
    for sequence in sequences:
        # The usual case.
        if not sequence.sampling_row.may_be_forced:
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
    """Allocate the block for one more token. Returns False and takes nothing if there is none."""
    return blocks.extend(sequence.blocks, sequence.num_blocks_for(len(sequence.tokens) + 1))
