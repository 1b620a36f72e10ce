"""Table of calculated token rates by batch size and draft length, for `cluster plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from core.types.step_timing import StepTiming
from planner.simulator.drafts import DraftRates


@dataclass(frozen=True, kw_only=True)
class DraftLine:
    """Rates of steps with num_rows rows, where each row with a proposal has a draft of `length` tokens."""

    num_rows: int
    length: int  # 0: no drafts
    tokens_per_row: float  # tokens per row and step
    step_s: float  # including the calls of a draft model
    floor: float  # acceptance probability above which one more draft token pays

    @property
    def tokens_per_s(self) -> float:
        return self.num_rows * self.tokens_per_row / self.step_s


def draft_table(
    timing: StepTiming, rates: DraftRates, *, num_rows: Sequence[int], context: int
) -> dict[int, list[DraftLine]]:
    """Return one line per draft length from 0 on, keyed by number of rows. context: tokens per row."""
    return {rows: _lines(timing, rates, rows, context=context) for rows in num_rows}


def best_of(lines: Sequence[DraftLine]) -> DraftLine:
    """Return the line with the highest token rate; among equals, the shortest drafts."""
    return max(lines, key=lambda line: line.tokens_per_s)


def _lines(timing: StepTiming, rates: DraftRates, num_rows: int, *, context: int) -> list[DraftLine]:
    plain_s = timing.step_s(num_tokens=num_rows, num_pairs=0, num_context=num_rows * context)
    expected = [0.0, *accumulate(accumulate(rates.accepted, mul))]  # expected accepted tokens by draft length
    lines = []
    for length, right in enumerate(expected):
        asking_s = rates.ask_s + rates.ask_place_s * length if length else 0.0
        lines.append(
            DraftLine(
                num_rows=num_rows,
                length=length,
                tokens_per_row=1 + rates.guessed * right,
                step_s=plain_s + timing.token_s * num_rows * rates.guessed * length + asking_s,
                floor=timing.token_s * num_rows / plain_s,
            )
        )
    return lines
