"""Fairness of the queue against invented names, and against clients that leave and return."""

from __future__ import annotations

import itertools
import sys
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.fair_queue import FairQueue, QueuedRequest, State

_numbers = itertools.count()


def _add(queue: FairQueue, tenant: str, *, user: str = "", cost: float = 1.0, priority: int = 0) -> QueuedRequest:
    queued = QueuedRequest(tenant, priority, cost, user=user, arrival=next(_numbers))
    queue.move(queued, State.READY)
    return queued


def _flood(queue: FairQueue, num_names: int) -> Counter[str]:
    """Count 200 served requests while one key invents a user name per request, and another has a single user."""
    for number in range(num_names):
        _add(queue, "inventive", user=f"name-{number}")
    for _ in range(100):
        _add(queue, "plain")
    return Counter(queue.pop().tenant for _ in range(200))


def test_invented_user_names_do_not_raise_a_share() -> None:
    assert _flood(FairQueue(), 2_000) == {"plain": 100, "inventive": 100}


@pytest.mark.slow
def test_fifty_thousand_invented_names_do_not_raise_a_share() -> None:
    assert _flood(FairQueue(), 50_000) == {"plain": 100, "inventive": 100}


def test_users_of_a_tenant_have_equal_shares() -> None:
    queue = FairQueue()
    for user, count in (("heavy", 50), ("light", 5)):
        for _ in range(count):
            _add(queue, "key", user=user, priority=-5 if user == "heavy" else 0)
    assert Counter(queue.pop().user for _ in range(10)) == {"heavy": 5, "light": 5}


_requests = st.tuples(st.sampled_from("ab"), st.sampled_from("uvw"), st.integers(1, 20), st.integers(-3, 3))
_moves = st.lists(
    st.one_of(
        _requests,
        st.tuples(st.just("pop")),
        st.tuples(st.sampled_from(["remove", "aside", "back"]), st.integers(0, 30)),
    ),
    max_size=80,
)


@given(_moves)
def test_counts_match_the_waiting_requests(moves: list[tuple[Any, ...]]) -> None:
    queue, waiting, aside = FairQueue(), deque[QueuedRequest](), list[QueuedRequest]()
    for move in moves:
        match move:
            case ("pop",):
                if queued := queue.first():
                    assert queued not in aside
                    waiting.remove(queue.pop())
            case (kind, int(at)) if waiting:
                queued = waiting[at % len(waiting)]
                if kind == "remove":
                    queue.move(queued, State.GONE)
                    waiting.remove(queued)
                    aside = [other for other in aside if other is not queued]
                elif kind == "aside":
                    queue.move(queued, State.ASIDE)
                    aside.append(queued)
                else:
                    queue.move(queued, State.READY)
                    aside = [other for other in aside if other is not queued]
            case (tenant, user, cost, priority):
                waiting.append(_add(queue, tenant, user=user, cost=float(cost), priority=priority))
        assert len(queue) == len(waiting)
        assert queue.cost == sum(queued.cost for queued in waiting)
        assert (queue.first() is None) == (len({*map(id, aside)}) == len(waiting))
        assert queue.num_tenants <= 2
    for queued in waiting:
        queue.move(queued, State.GONE)
    assert (len(queue), queue.cost, queue.num_tenants) == (0, 0.0, 0)


@given(st.lists(_requests, min_size=30, max_size=100))
def test_two_waiting_flows_differ_by_at_most_one_request_each(asked: list[tuple[str, str, int, int]]) -> None:
    """Holds between tenants, and between the users of one tenant."""
    queue = FairQueue()
    left: Counter[tuple[str, ...]] = Counter()
    for tenant, user, cost, priority in asked:
        _add(queue, tenant, user=user, cost=float(cost), priority=priority)
        left.update([(tenant,), (tenant, user)])
    served = dict.fromkeys(left, 0.0)
    rivals = [(one, other) for one in left for other in left if one < other and one[:-1] == other[:-1]]
    while queue.first():
        queued = queue.pop()
        for name in ((queued.tenant,), queued.names):
            left[name] -= 1
            served[name] += queued.cost
        rivals = [(one, other) for one, other in rivals if left[one] and left[other]]
        for one, other in rivals:
            assert abs(served[one] - served[other]) <= 2 * 20


_strategies = st.lists(
    st.tuples(
        st.sampled_from(["invent", "again", "cancel"]),
        st.integers(1, 8),  # cost
        st.integers(0, 3),  # requests served afterwards
    ),
    min_size=1,
    max_size=60,
)


@given(_strategies, st.integers(1, 8))
def test_an_adversary_cannot_starve_a_user(strategy: list[tuple[str, int, int]], cost: int) -> None:
    """An adversary that sees everything repeats its moves, with at most `most` waiting requests.

    The victim has just been served, so its next request may wait for the work that makes up for that turn, from each
    possible flow, and for one request of each.
    """
    queue, most, largest = FairQueue(), 6, 8.0
    for _ in range(2):  # served first, so its next request is due late
        _add(queue, "key", user="victim", cost=float(cost))
    theirs = [_add(queue, "key", user="first")]
    queue.pop()
    victim = next(queued for queued in (queue.first(),) if queued)
    victim = victim if victim.user == "victim" else _victim_of(queue)
    others, names = 0.0, 0
    bound = 2 * (most + 1) * (largest + cost)
    for step in range(10_000):
        kind, size, num_served = strategy[step % len(strategy)]
        if kind == "cancel" and theirs:
            queue.move(theirs.pop(), State.GONE)
        elif len(theirs) < most:
            names += kind == "invent"
            theirs.append(_add(queue, "key", user=f"name-{names}", cost=float(size)))
        taken = _serve(queue, victim, theirs, count=max(num_served, step % 2), most=bound - others)
        if taken is None:
            return
        others += taken
    raise AssertionError("it was never its turn")


def _serve(
    queue: FairQueue, awaited: QueuedRequest, theirs: list[QueuedRequest], *, count: int, most: float
) -> float | None:
    """Serve up to `count` requests and return the work done; None if `awaited` was served.

    Stops early if no request of `theirs` is left. Fails if the work exceeds `most`.
    """
    taken = 0.0
    for _ in range(count):
        queued = queue.pop()
        if queued is awaited:
            return None
        theirs.remove(queued)
        taken += queued.cost
        assert taken <= most
        if not theirs:
            break
    return taken


def _victim_of(queue: FairQueue) -> QueuedRequest:
    """Return the victim's second request, which is queued behind others."""
    seen = []
    while (queued := queue.first()) and queued.user != "victim":
        queue.move(queued, State.ASIDE)
        seen.append(queued)
    assert queued
    for other in seen:
        queue.move(other, State.READY)
    return queued


_LEVELS = {
    "tenant": lambda number: {"tenant": f"tenant-{number}"},
    "user": lambda number: {"tenant": "key", "user": f"name-{number}"},
    "priority": lambda number: {"tenant": "key", "user": "victim", "priority": -number},
}
_VICTIMS = {"tenant": {"tenant": "victim"}, "user": {"tenant": "key", "user": "victim"}}


@pytest.mark.parametrize("level", _LEVELS)
@given(
    st.lists(
        st.tuples(st.sampled_from(["invent", "again", "cancel"]), st.integers(100, 200), st.integers(0, 3)),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 3),
    st.integers(4, 30),
)
def test_wait_is_bounded_regardless_of_later_arrivals(
    level: str, strategy: list[tuple[str, int, int]], num_older: int, most: int
) -> None:
    """The bound of router/routing/fair_queue.py also holds for a flow that has just been served a huge request, and
    for a request with a high priority number. The adversary always has requests waiting and invents names."""
    queue, rival, victim = FairQueue(), _LEVELS[level], _VICTIMS.get(level, {"tenant": "key", "user": "victim"})
    if level in _VICTIMS:
        _add(queue, **victim, cost=1e6)
    theirs = [_add(queue, **rival(number), cost=200.0) for number in range(num_older)]
    waits = _add(queue, **victim, cost=1e6, priority=5)
    if level in _VICTIMS:
        assert queue.pop().cost == 1e6
    others, bound, names = 0.0, 16_384 + 18 * (num_older + 1) * 200, num_older
    for step in range(10_000):
        kind, size, num_served = strategy[step % len(strategy)]
        if kind == "cancel" and len(theirs) > 1:
            queue.move(theirs.pop(), State.GONE)
        while len(theirs) < 1 + (step + size) % most:
            names += kind != "again"
            theirs.append(_add(queue, **rival(names), cost=float(size)))
        taken = _serve(queue, waits, theirs, count=max(num_served, step % 2), most=bound - others)
        if taken is None:
            return
        others += taken
    raise AssertionError("it was never its turn")


def test_aged_requests_take_a_small_part_of_the_work() -> None:
    """A tenant with large requests exceeds its share and is due late. It ages, and the others keep their shares."""
    queue, served = FairQueue(), Counter[str]()
    for tenant, cost in (("large", 8_000.0), *((f"small-{number}", 100.0) for number in range(40))):
        for _ in range(3):
            _add(queue, tenant, cost=cost)
    while served.total() < 1_000_000:
        queued = queue.pop()
        served[queued.tenant] += int(queued.cost)
        _add(queue, queued.tenant, cost=queued.cost)
    assert 1_000_000 / 41 - 8_000 <= served["large"] <= 1_000_000 / 17 + 2 * 8_000  # two at once to begin with
    small = [count for tenant, count in served.items() if tenant != "large"]
    assert max(small) - min(small) <= 200


def test_removed_tenants_are_forgotten() -> None:
    queue = FairQueue()
    _add(queue, "stays")
    for number in range(3_000):
        queue.move(_add(queue, f"tenant-{number}", user=f"user-{number}"), State.GONE)
    assert (len(queue), queue.num_tenants) == (1, 1)


def test_an_idle_tenant_is_forgotten_once_others_catch_up() -> None:
    queue = FairQueue()
    for _ in range(2_000):
        _add(queue, "steady")
    for number in range(900):
        _add(queue, f"tenant-{number}", cost=5.0)
        queue.pop()
    while len(queue) > 1:
        queue.pop()
    assert queue.num_tenants < 100


def _num_lines(action: Callable[[], object]) -> int:
    """Count the executed lines of Python, a measure that is the same on every machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def _work_at(num_tenants: int) -> dict[str, int]:
    """Return the work of each operation while num_tenants tenants wait, and after they have gone."""
    queue = FairQueue()
    everyone = [_add(queue, f"tenant-{number}", user="u", cost=1.0 + number % 7) for number in range(num_tenants)]
    work = {
        "add": _num_lines(lambda: _add(queue, "one-more")),
        "peek": _num_lines(queue.first),
        "remove": _num_lines(lambda: queue.move(everyone[num_tenants // 3], State.GONE)),
        "pop": _num_lines(queue.pop),
    }
    for queued in everyone:
        queue.move(queued, State.GONE)
    _add(queue, "one-more")
    return work | {"add after": _num_lines(lambda: _add(queue, "another")), "peek after": _num_lines(queue.first)}


@pytest.mark.parametrize("many", [8_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_no_operation_visits_all_waiting_requests(many: int) -> None:
    few, more = _work_at(100), _work_at(many)
    for name, lines in more.items():
        assert lines <= 4 * few[name] + 50, (name, few[name], lines)
