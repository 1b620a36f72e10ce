"""Conformance suite of eviction policies, and properties of ReuseValue."""

from __future__ import annotations

import pytest

from engine.kv.eviction import EVICTIONS, Origin, ReuseValue, make_eviction
from engine.kv.reuse_history import ReuseHistory


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _hash(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15 % (1 << 128)).to_bytes(16, "little")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_eviction" in metafunc.fixturenames:
        metafunc.parametrize("any_eviction", [*EVICTIONS, *metafunc.config.getoption("eviction")])


def test_every_candidate_is_evicted_exactly_once(any_eviction: str) -> None:
    eviction = make_eviction(any_eviction, num_blocks=4, clock=FakeClock())
    for block in range(20):
        eviction.full(_hash(block))
        eviction.add(block, _hash(block), Origin(block % 3))
    for block in (3, 4, 5):
        eviction.used(block, _hash(block))
    eviction.add(4, _hash(4), Origin.FIRST)
    assert 3 not in eviction and 4 in eviction and len(eviction) == 18
    assert sorted(eviction.pop() for _ in range(18)) == sorted({*range(20)} - {3, 5})
    with pytest.raises(KeyError):
        eviction.pop()


def test_spare_blocks_are_evicted_first(any_eviction: str) -> None:
    eviction = make_eviction(any_eviction, num_blocks=4, clock=FakeClock())
    for block in range(5):
        eviction.add(block, _hash(block), Origin.FIRST)
    eviction.spare(3)
    assert eviction.pop() == 3


def test_oldest_of_one_kind_is_evicted_first(any_eviction: str) -> None:
    eviction = make_eviction(any_eviction, num_blocks=4, clock=FakeClock())
    for block in (4, 2, 7):
        eviction.add(block, _hash(block), Origin.FIRST)
    assert [eviction.pop() for _ in range(3)] == [4, 2, 7]


def test_scan_does_not_evict_the_working_set() -> None:
    """A scan far larger than the cache passes between two uses of a working set; LRU would lose all of it."""
    clock = FakeClock()
    eviction = ReuseValue(num_ghosts=400, clock=clock)
    room, hot = 200, range(50)
    for block in hot:
        eviction.add(block, _hash(block), Origin.FIRST)
    hits = 0
    for round_number in range(20):
        for i in range(300):
            clock.now += 0.1
            block = 1000 + round_number * 300 + i
            eviction.add(block, _hash(block), Origin.FIRST)
            while len(eviction) > room:
                eviction.pop()
        for block in hot:
            if block in eviction:
                eviction.used(block, _hash(block))
                hits += 1
            else:
                eviction.full(_hash(block))
            eviction.add(block, _hash(block), Origin.FIRST)
    assert hits > 15 * len(hot)


def test_memory_is_bounded_by_num_ghosts() -> None:
    eviction = ReuseValue(num_ghosts=10, clock=FakeClock())
    for block in range(500):
        eviction.add(block, _hash(block), Origin.FIRST)
        eviction.pop()
    assert len(eviction._past) == 10


def test_popular_prefix_does_not_count_as_a_conversation() -> None:
    eviction = ReuseValue(num_ghosts=10, clock=FakeClock())
    assert eviction.origin_after(None) is Origin.FIRST
    for _ in range(3):
        eviction.add(1, _hash(1), Origin.FIRST)
        eviction.used(1, _hash(1))
    assert eviction.origin_after(_hash(1)) is Origin.CONTINUED
    for _ in range(10):
        eviction.used(1, _hash(1))
    assert eviction.origin_after(_hash(1)) is Origin.FIRST


def test_reused_kind_has_a_higher_index() -> None:
    history = ReuseHistory([1.0, 1.0])
    for _ in range(500):
        history.used(0, 30.0)
        history.lost(1, 300.0)
    history.learn([], keep=1.0)
    assert history.index(0, 10.0) > 10 * history.index(1, 10.0)
    # A block without reuse so far is unlikely to be reused.
    assert history.index(0, 10.0) > history.index(0, 200.0)
