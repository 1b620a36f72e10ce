"""Steps that are launched behind another one whose tokens nobody knows yet: so a device never waits for the host.

Step n + 1 is planned as if no row of step n ended. Its rows take their tokens on the device, from what the sampler of n
has chosen; until those are known a sequence stays as it was before n. Then n is booked. A row of n + 1 whose sequence
has ended by that, or has left for any other reason, was computed for nothing: the one position that it wrote is behind
all that the sequence had computed, in a block of its own that was not full, so that nobody finds it; and whoever gets
that block next comes behind it on the device.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from engine.batch.batch import DeviceTokens
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import ScheduledStep


def may_be_followed(step: ScheduledStep, running: Collection[Sequence]) -> bool:
    """Whether the next step can be planned before this one's tokens are known, and has something to compute."""
    planned = step.next_tokens
    if planned is None or any(row.reads_tokens for row in planned.rows.readers):
        return False
    return any(sequence in running and not sequence.ends_with_next for sequence in planned.rows.sequences)


def expect(step: ScheduledStep, running: Collection[Sequence]) -> list[Sequence]:
    """Those to whom a token is coming of this step; from now on they are planned with."""
    in_flight = [sequence for sequence, _ in step.decoding if sequence in running]
    for sequence in in_flight:
        sequence.sampling_row.num_in_flight = 1
    return in_flight


def device_tokens_of(step: ScheduledStep, behind: ScheduledStep) -> DeviceTokens | None:
    """The tokens that `step` computes and `behind` chooses."""
    assert behind.sampled
    if step.next_tokens and behind.next_tokens and step.next_tokens.rows is behind.next_tokens.rows:  # mostly
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
