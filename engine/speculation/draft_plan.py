"""How many tokens to draft for each row of a step: as many as make tokens come soonest, all rows together."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepPrice:
    """What a step takes: seconds; or anything in proportion, where nobody is asked whose answers take time."""

    plain: float  # without drafts
    token: float  # each drafted token
    drafting: float = 1.0  # times what both come to, where anything is drafted

    def step(self, num_drafted: int) -> float:
        return (self.plain + self.token * num_drafted) * self.drafting if num_drafted else self.plain

    def floor(self, num_rows: int) -> float:
        """The chance above which a drafted token can pay: beside the tokens that so many rows get anyway."""
        return self.token * num_rows / self.plain


_LEAST_GAIN = 1.01  # to guess takes time, too
FREE = StepPrice(plain=1.0, token=0.0)  # nobody knows: whatever may be right is drafted


def plan_drafts(chances: Seq[Seq[float]], num_rows: int, price: StepPrice, max_tokens: int) -> list[int]:
    """The lengths for which tokens / seconds is greatest, at most so many tokens together; none where that is hardly
    more than without any.

    chances: of each drafted token of each row, that it and all before it are right: so they fall along a row.
    num_rows: that get a token anyway.
    """
    # No token pays that would not pay alone, beside those that come anyway.
    floor = price.floor(num_rows)
    tokens = sorted(((chance, i) for i, row in enumerate(chances) for chance in row if chance > floor), reverse=True)
    best, best_rate = 0, num_rows / price.plain * (_LEAST_GAIN if price.token else 1.0)
    expected = float(num_rows)
    for num_drafted, (chance, _) in enumerate(tokens[:max_tokens], 1):
        expected += chance
        rate = expected / price.step(num_drafted)
        if rate > best_rate:
            best, best_rate = num_drafted, rate
    lengths = [0] * len(chances)
    for _, i in tokens[:best]:
        lengths[i] += 1
    return lengths
