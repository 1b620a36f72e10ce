"""Parsing of options that list integers."""

from __future__ import annotations

from core.types.errors import SpecError


def parse_counts(option: str, counts: str) -> list[int]:
    try:
        numbers = [int(count) for count in counts.split(",") if count]
    except ValueError:
        numbers = [0]
    if any(number < 1 for number in numbers):
        raise SpecError(f"--{option} {counts}: write integers above 0, separated by commas")
    return numbers
