"""Whether work grows with what it is given, and no faster, where its steps cannot be counted."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(work: Callable[[int], object], size: int) -> float:
    """How many times as much of this thread's processor time four times the size takes: 4 where it is linear, 16 where
    it is quadratic. Both in turn, the least of three each, so that a busy machine does not matter."""
    times = [(_cost(work, size), _cost(work, 4 * size)) for _ in range(3)]
    return min(large for _, large in times) / min(small for small, _ in times)


def _cost(work: Callable[[int], object], size: int) -> float:
    begin = time.thread_time()
    work(size)
    return time.thread_time() - begin
