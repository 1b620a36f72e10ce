"""Output of a part: rows, one JSON object per line of standard output, as soon as each is known."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement or test."""

    name: str
    value: float | str
    unit: str = ""
    at_least: float | None = None  # threshold if larger is better
    at_most: float | None = None  # threshold if smaller is better
    has_failed: bool = False  # wrong, not only slow
    is_skipped: bool = False

    @property
    def verdict(self) -> str:
        if self.has_failed:
            return "FAILED"
        if self.is_skipped:
            return "skipped"
        if self.at_least is None and self.at_most is None:
            return ""
        return "met" if self._is_met else "MISSED"

    @property
    def is_fine(self) -> bool:
        return self.verdict not in ("FAILED", "MISSED")

    @property
    def threshold(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return f"≤ {self.at_most:g}" if self.at_most is not None else ""

    @property
    def shown(self) -> str:
        return self.value if isinstance(self.value, str) else f"{self.value:.4g}"

    @property
    def _is_met(self) -> bool:
        assert isinstance(self.value, float | int)
        is_enough = self.at_least is None or self.value >= self.at_least
        return is_enough and (self.at_most is None or self.value <= self.at_most)


def tell(name: str, value: float | str, unit: str = "", **more: Any) -> None:
    """Print a row. Called in a part's program."""
    print(json.dumps(asdict(Row(name=name, value=value, unit=unit, **more))), flush=True)


def skip(name: str, why: str) -> None:
    tell(name, why, is_skipped=True)


def heard(line: str) -> Row | None:
    """Parse the row of a line; None for other output, such as that of libraries."""
    try:
        fields = json.loads(line)
        return _row(fields) if isinstance(fields, dict) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _row(fields: dict[str, Any]) -> Row:
    """Raises TypeError or ValueError for invalid values."""
    row = Row(**fields)
    thresholds = [one for one in (row.at_least, row.at_most) if one is not None]
    numbers = [*thresholds, *([row.value] if thresholds or not isinstance(row.value, str) else [])]
    if not all(isinstance(one, int | float) for one in numbers):
        raise TypeError("a number is wanted")
    if not (isinstance(row.has_failed, bool) and isinstance(row.is_skipped, bool)):
        raise TypeError("true or false is wanted")
    "".join((row.name, row.unit, row.shown)).encode()
    return row
