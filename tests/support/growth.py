"""Growth of a function's cost with its input size, for functions whose steps cannot be counted."""

from __future__ import annotations

import time
from collections.abc import Callable


def growth(work: Callable[[int], object], size: int) -> float:
    """Return the ratio of this thread's CPU time at 4 * size and at size: 4 for linear cost, 16 for quadratic.

    Takes the minimum of three alternating runs each, so that a busy machine does not matter.
    """
    times = [(_cost(work, size), _cost(work, 4 * size)) for _ in range(3)]
    return min(large for _, large in times) / min(small for small, _ in times)


def _cost(work: Callable[[int], object], size: int) -> float:
    begin = time.thread_time()
    work(size)
    return time.thread_time() - begin
