"""What drafts would give, worked out: tokens a second by the rows of a step and the length of their drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from core.types.step_timing import StepTiming
from planner.simulator.drafts import DraftRates


@dataclass(frozen=True, kw_only=True)
class DraftLine:
    """Steps of so many rows, each with a draft of so many tokens where there is anything to guess from."""

    num_rows: int
    length: int  # 0: nothing is drafted
    tokens_per_row: float  # that a row gets in a step
    step_s: float  # with asking for the drafts
    floor: float  # a token more pays, beside rows without, if it is right with a chance above that

    @property
    def tokens_per_s(self) -> float:
        return self.num_rows * self.tokens_per_row / self.step_s


def draft_table(
    timing: StepTiming, rates: DraftRates, *, num_rows: Sequence[int], context: int
) -> dict[int, list[DraftLine]]:
    """By number of rows: a line for each length from 0 on. context: tokens that each row has."""
    return {rows: _lines(timing, rates, rows, context=context) for rows in num_rows}


def best_of(lines: Sequence[DraftLine]) -> DraftLine:
    """With most tokens a second; of equals, the shortest drafts."""
    return max(lines, key=lambda line: line.tokens_per_s)


def _lines(timing: StepTiming, rates: DraftRates, num_rows: int, *, context: int) -> list[DraftLine]:
    plain_s = timing.step_s(num_tokens=num_rows, num_pairs=0, num_context=num_rows * context)
    expected = [0.0, *accumulate(accumulate(rates.accepted, mul))]  # right tokens of a draft of each length
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
