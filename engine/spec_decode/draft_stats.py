"""Counts of draft tokens, and the yield of a row of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_MEMORY = 512.0  # rows; older ones count little
_MIN_DRAFTED = 1e-6  # tokens; a smaller mean is the rest of drafts long ago


@dataclass(eq=False, slots=True)
class DraftCounts:
    """Drafted and accepted tokens of one method, by place in the draft."""

    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)


class RowYield:
    """Running mean of tokens gained and drafted per decoding row of a step. Owned by the step thread."""

    def __init__(self) -> None:
        self._rows = self._tokens = self._drafted = 0.0

    def add(self, num_rows: int, *, num_tokens: int, num_drafted: int) -> None:
        """Count a step whose decoding rows gained num_tokens and computed num_drafted beside their own."""
        keep = max(0.0, 1 - num_rows / _MEMORY)
        self._rows = self._rows * keep + num_rows
        self._tokens = self._tokens * keep + num_tokens
        self._drafted = self._drafted * keep + num_drafted

    @property
    def tokens_per_row(self) -> float:
        """0 before the first row."""
        return self._tokens / self._rows if self._rows else 0.0

    @property
    def drafted_per_row(self) -> float:
        drafted = self._drafted / self._rows if self._rows else 0.0
        return drafted if drafted >= _MIN_DRAFTED else 0.0
