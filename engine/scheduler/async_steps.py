"""Async scheduling: launch a step before the tokens of the previous one are known, so that the device never idles.

Step n + 1 is planned as if no row of step n ended. Its rows read their tokens on the device from the sampler's output
of step n, and sequences keep their state from before n until those tokens arrive.

If a sequence ends or is removed in step n, its row of n + 1 is wasted. The position that this row wrote lies after all
computed positions, in a private block that is not full. So it cannot be found in the cache, and the next owner of the
block is ordered after it on the device. With recurrent layers the row also advances the sequence's state; the same
holds for the slot of that state. A checkpoint due between n and n + 1 is copied on the device between the two; it only
depends on tokens that were known before n.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from engine.batch.batch import DeviceTokens
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import ScheduledStep


def may_be_followed(step: ScheduledStep, running: Collection[Sequence]) -> bool:
    """Return True if the next step can be planned before this one's tokens are known, and has rows to compute."""
    planned = step.next_tokens
    if planned is None or any(row.reads_tokens for row in planned.rows.readers):
        return False
    return any(sequence in running and not sequence.ends_with_next for sequence in planned.rows.sequences)


def expect(step: ScheduledStep, running: Collection[Sequence]) -> list[Sequence]:
    """Return the running sequences that get a token from this step, after marking that token as in flight."""
    in_flight = [sequence for sequence, _ in step.decoding if sequence in running]
    for sequence in in_flight:
        sequence.sampling_row.num_in_flight = 1
    return in_flight


def device_tokens_of(step: ScheduledStep, behind: ScheduledStep) -> DeviceTokens | None:
    """Return the tokens that `behind` chooses and `step` computes."""
    assert behind.sampled
    # The usual case: the same rows as in the step before.
    if step.next_tokens and behind.next_tokens and step.next_tokens.rows is behind.next_tokens.rows:
        rows_R = step.next_tokens.rows.numbers_R
        return DeviceTokens(token_ids=behind.sampled.token_ids, sources=rows_R, places=rows_R)
    place_of = {sequence: place for place, (sequence, _) in enumerate(behind.decoding)}
    begins, sources, places = 0, list[int](), list[int]()
    for sequence, num_tokens in step.decoding:
        if sequence.num_in_flight:
            sources.append(place_of[sequence])
            places.append(begins)
        begins += num_tokens
    if not sources:
        return None
    return DeviceTokens(token_ids=behind.sampled.token_ids, sources=np.array(sources), places=np.array(places))
