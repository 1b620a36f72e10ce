"""Calculated tokens per second by the rows of a step and the length of their drafts, for `cluster plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from core.types.step_timing import StepTiming
from planner.simulator.drafts import DraftRates


@dataclass(frozen=True, kw_only=True)
class DraftLine:
    """Steps with num_rows rows, each with a draft of `length` tokens where there is a proposal."""

    num_rows: int
    length: int  # 0: no drafts
    tokens_per_row: float  # gained by a row in a step
    step_s: float  # with the calls of a model proposer
    floor: float  # chance above which one more draft token pays

    @property
    def tokens_per_s(self) -> float:
        return self.num_rows * self.tokens_per_row / self.step_s


def draft_table(
    timing: StepTiming, rates: DraftRates, *, num_rows: Sequence[int], context: int
) -> dict[int, list[DraftLine]]:
    """Return, by number of rows, a line for each length from 0 on. context: tokens of each row."""
    return {rows: _lines(timing, rates, rows, context=context) for rows in num_rows}


def best_of(lines: Sequence[DraftLine]) -> DraftLine:
    """Return the line with most tokens per second; among equals, the shortest drafts."""
    return max(lines, key=lambda line: line.tokens_per_s)


def _lines(timing: StepTiming, rates: DraftRates, num_rows: int, *, context: int) -> list[DraftLine]:
    plain_s = timing.step_s(num_tokens=num_rows, num_pairs=0, num_context=num_rows * context)
    expected = [0.0, *accumulate(accumulate(rates.accepted, mul))]  # accepted tokens of a draft of each length
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
