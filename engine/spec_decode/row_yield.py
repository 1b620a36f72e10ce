"""What a row of a step brings, and what it computes for that."""

from __future__ import annotations

_MEMORY = 512.0  # rows: what is older counts for little
_LEAST = 1e-6  # tokens of a row: what is left of drafts long ago, and is nothing


class RowYield:
    """Owned by the step thread."""

    def __init__(self) -> None:
        self._rows = self._tokens = self._drafted = 0.0

    def add(self, num_rows: int, *, num_tokens: int, num_drafted: int) -> None:
        """A step had so many rows that decode, which got so many tokens and computed so many beside their own."""
        keep = max(0.0, 1 - num_rows / _MEMORY)
        self._rows = self._rows * keep + num_rows
        self._tokens = self._tokens * keep + num_tokens
        self._drafted = self._drafted * keep + num_drafted

    @property
    def tokens_per_row(self) -> float:
        """0 until there was a row."""
        return self._tokens / self._rows if self._rows else 0.0

    @property
    def drafted_per_row(self) -> float:
        drafted = self._drafted / self._rows if self._rows else 0.0
        return drafted if drafted >= _LEAST else 0.0
