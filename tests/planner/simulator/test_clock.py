"""Steps on shared cores, against durations worked out by hand."""

from __future__ import annotations

import pytest

from planner.simulator.clock import Clock, Cores


def _ends(slowdown: list[float], steps: list[tuple[float, float]]) -> dict[int, float]:
    """Return the end time of each step, given as (begin, seconds alone)."""
    clock = Clock()
    cores = Cores(clock, slowdown)
    ends: dict[int, float] = {}

    def begin(number: int, seconds: float) -> None:
        cores.run(seconds, lambda: ends.setdefault(number, clock.now), width=1)

    for number, (at, seconds) in enumerate(steps):
        clock.at(at, lambda number=number, seconds=seconds: begin(number, seconds))
    clock.run()
    return ends


def test_a_lone_step_takes_its_time() -> None:
    assert _ends([1.0, 2.0], [(1.0, 3.0), (10.0, 1.0)]) == {0: 4.0, 1: 11.0}


def test_concurrent_steps_slow_each_other_down() -> None:
    # From 0 to 1 alone; then both at half speed until the second has had its 1 s; then alone again.
    assert _ends([1.0, 2.0], [(0.0, 4.0), (1.0, 1.0)]) == pytest.approx({0: 5.0, 1: 3.0})


def test_unmeasured_concurrency_shares_the_last_throughput() -> None:
    assert _ends([1.0, 1.5], [(0.0, 1.0)] * 4) == pytest.approx(dict.fromkeys(range(4), 3.0))


def test_a_step_may_begin_when_another_ends() -> None:
    clock = Clock()
    cores = Cores(clock, [1.0])
    ends: list[float] = []
    cores.run(1.0, lambda: cores.run(2.0, lambda: ends.append(clock.now), width=1), width=1)
    clock.run()
    assert ends == [3.0]


def test_a_wide_step_counts_as_several_and_is_not_slowed_by_itself() -> None:
    clock = Clock()
    cores = Cores(clock, [1.0, 1.2, 3.0])
    ends: dict[str, float] = {}
    cores.run(1.0, lambda: ends.setdefault("wide", clock.now), width=2)
    clock.at(0.5, lambda: cores.run(1.0, lambda: ends.setdefault("narrow", clock.now), width=1))
    clock.run()
    # Alone until 0.5; then three at a time, which is 3 / 1.2 times as slow for the wide one; then the narrow one alone.
    assert ends == pytest.approx({"wide": 0.5 + 0.5 * 2.5, "narrow": 1.75 + 1.0 - 1.25 / 3.0})
