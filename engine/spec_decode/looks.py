"""At which rows somebody looks what to draft for them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from engine.scheduler.sequence import Sequence

_IN_VAIN = 8  # looks
_EVERY = 4  # steps
_MANY, _EVERY_OF_MANY = 8, 8  # rows, steps


class Looks:
    """Owned by the step thread. At a row of which nothing was worth drafting lately somebody looks every few steps, all
    such rows in the same one: a look takes some 15 us a row and 50 for all, on a processor whose caches a step has
    swept, which is 2 % of a small model's step."""

    def __init__(self) -> None:
        self._num_plans = 0
        self._in_vain: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()  # looks since something was worth it

    def due(self, rows: Seq[Sequence]) -> Seq[Sequence]:
        """Those of a step's rows at which somebody is to look. Asked once for each plan: a step that is waited for has
        two, one before that and one when its tokens are known."""
        self._num_plans += 1
        if self._num_plans % (_EVERY if len(rows) < _MANY else _EVERY_OF_MANY) == 0:
            return rows
        in_vain = self._in_vain
        return [row for row in rows if in_vain.get(row, 0) < _IN_VAIN]

    def brought(self, looks: Iterable[tuple[Sequence, int]]) -> None:
        """Of each row at which somebody has looked, so many tokens were worth drafting."""
        for row, num_tokens in looks:
            self._in_vain[row] = 0 if num_tokens else self._in_vain.get(row, 0) + 1
