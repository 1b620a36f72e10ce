"""Grids of test cases. The default run takes a part; the rest is marked slow, and runs on GPUs, too."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import combinations, product
from typing import Any

import pytest


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the axes' values, marked so that the default run has each pair of two axes' values.

    A value that is a tuple stands for several parameters.
    """
    values = [list(axis) for axis in axes]
    places = list(product(*(range(len(axis)) for axis in values)))
    wanted = {pair for place in places for pair in combinations(enumerate(place), 2)}
    chosen = set()
    while wanted:
        place = max(places, key=lambda place: len(wanted.intersection(combinations(enumerate(place), 2))))
        chosen.add(place)
        wanted.difference_update(combinations(enumerate(place), 2))
    parts = [[value if isinstance(value, tuple) else (value,) for value in axis] for axis in values]
    return [_param(sum((parts[a][i] for a, i in enumerate(place)), ()), place in chosen) for place in places]


def quick(cases: Iterable[Any], by_default: Container[Any]) -> list[Any]:
    """Return the cases, marked so that the default run has those in `by_default`. Tuples have a value per parameter."""
    return [_param(case if isinstance(case, tuple) else (case,), case in by_default) for case in cases]


def _param(values: tuple[Any, ...], by_default: bool) -> Any:
    return pytest.param(*values, marks=() if by_default else pytest.mark.slow)
