"""Who goes next, and who is told at once that there is no room."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types.errors import CapacityError
from router.routing.admission import AdmissionQueue
from router.routing.fair_shares import QueuedRequest

_LONG_S = 1e9


def _fill(queue: AdmissionQueue, *requests: QueuedRequest) -> None:
    for request in requests:
        queue.add(request, within_s=_LONG_S, now=0.0)


def _drain(queue: AdmissionQueue, *, seconds_each: float = 1.0) -> list[QueuedRequest]:
    order, now = [], 0.0
    while queue.peek():
        now += seconds_each
        order.append(queue.pop(now=now))
    return order


def _busy(*, max_waiting: int = 1000) -> AdmissionQueue:
    """A queue that drains 10 tokens a second, and has one request of a tenant "x" waiting."""
    queue = AdmissionQueue(max_waiting=max_waiting)
    _fill(queue, *(QueuedRequest("x", 0, 10.0) for _ in range(11)))
    for second in range(10):
        queue.pop(now=float(second))
    return queue


def test_one_tenant_goes_by_priority_and_then_by_arrival() -> None:
    queue = AdmissionQueue(max_waiting=100)
    queued = [QueuedRequest("", priority, 1.0) for priority in (0, 5, -1, 0)]
    _fill(queue, *queued)
    assert _drain(queue) == [queued[2], queued[0], queued[3], queued[1]]


def test_a_flood_does_not_hold_up_another_tenant() -> None:
    queue = AdmissionQueue(max_waiting=1000)
    _fill(queue, *(QueuedRequest("flood", -100, 1.0) for _ in range(200)))
    _fill(queue, *(QueuedRequest("light", 0, 1.0) for _ in range(5)))
    assert Counter(queued.tenant for queued in _drain(queue)[:10]) == {"flood": 5, "light": 5}


def test_shares_are_of_work_not_of_requests() -> None:
    queue = AdmissionQueue(max_waiting=1000)
    _fill(
        queue,
        *(QueuedRequest("large", 0, 90.0) for _ in range(50)),
        *(QueuedRequest("small", 0, 10.0) for _ in range(50)),
    )
    assert Counter(queued.tenant for queued in _drain(queue)[:20]) == {"small": 18, "large": 2}


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    queue = AdmissionQueue(max_waiting=1000)
    _fill(queue, *(QueuedRequest("steady", 0, 1.0) for _ in range(60)))
    for second in range(50):
        queue.pop(now=float(second))
    _fill(queue, *(QueuedRequest("back", 0, 1.0) for _ in range(10)))
    assert Counter(queued.tenant for queued in _drain(queue)[:10])["steady"] >= 4


def test_one_tenant_leaves_half_of_the_queue_to_others() -> None:
    queue = AdmissionQueue(max_waiting=10)
    _fill(queue, *(QueuedRequest("flood", 0, 1.0) for _ in range(5)))
    with pytest.raises(CapacityError, match="5 requests are waiting already"):
        _fill(queue, QueuedRequest("flood", 0, 1.0))
    _fill(queue, *(QueuedRequest("light", 0, 1.0) for _ in range(3)))
    with pytest.raises(CapacityError):
        _fill(queue, QueuedRequest("light", 0, 1.0))


def test_a_turn_that_would_come_too_late_is_refused_with_a_hint() -> None:
    queue = _busy()
    for _ in range(4):
        queue.add(QueuedRequest("x", 0, 10.0), within_s=20.0, now=10.0)
    assert queue.wait_s(QueuedRequest("x", 0, 10.0)) == pytest.approx(5.0)
    with pytest.raises(
        CapacityError, match=r"it would wait 5\.0 s for its turn, more than half of the 2\.0 s"
    ) as rejected:
        queue.add(QueuedRequest("x", 0, 10.0), within_s=2.0, now=10.0)
    assert rejected.value.retry_after_s == pytest.approx(4.0)
    queue.add(QueuedRequest("x", -1, 10.0), within_s=4.0, now=10.0)  # it goes before them
    queue.add(QueuedRequest("y", 0, 10.0), within_s=4.0, now=10.0)  # it has a share of its own


def test_time_without_a_queue_does_not_count_as_slow() -> None:
    queue = _busy()
    queue.pop(now=10.0)
    _fill_at = 10_000.0
    queue.add(QueuedRequest("x", 0, 10.0), within_s=_LONG_S, now=_fill_at)
    assert queue.wait_s(QueuedRequest("x", 0, 10.0)) == pytest.approx(1.0, rel=0.2)


def test_who_has_gone_is_not_admitted() -> None:
    queue = AdmissionQueue(max_waiting=100)
    queued = [QueuedRequest("", 0, 1.0) for _ in range(3)]
    _fill(queue, *queued)
    queue.remove(queued[0], now=1.0)
    queue.remove(queued[0], now=1.0)
    assert len(queue) == 2 and _drain(queue) == queued[1:]


_moves = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(-2, 2), st.integers(1, 50)),
        st.tuples(st.just("pop")),
        st.tuples(st.just("remove"), st.integers(0, 30)),
    ),
    max_size=80,
)


@given(_moves)
def test_everyone_goes_once_or_has_gone(moves: list[tuple]) -> None:
    queue = AdmissionQueue(max_waiting=40)
    waiting: list[QueuedRequest] = []
    for now, (move, *arguments) in enumerate(moves):
        if move == "add":
            queued = QueuedRequest(arguments[0], arguments[1], float(arguments[2]))
            try:
                queue.add(queued, within_s=30.0, now=float(now))
                waiting.append(queued)
            except CapacityError as error:
                assert error.retry_after_s > 0
        elif move == "pop" and waiting:
            head = queue.peek()
            assert head is queue.pop(now=float(now))
            own = [queued for queued in waiting if queued.tenant == head.tenant]
            assert not any(queued < head for queued in own)
            waiting.remove(head)
        elif move == "remove" and waiting:
            queue.remove(waiting.pop(arguments[0] % len(waiting)), now=float(now))
        assert len(queue) == len(waiting)
        assert (queue.peek() is None) == (not waiting)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), min_size=30, max_size=120))
def test_while_all_wait_no_tenant_is_ahead_of_another_by_more_than_a_request(asked: list[tuple[str, int]]) -> None:
    queue = AdmissionQueue(max_waiting=10_000)
    left: Counter[str] = Counter(tenant for tenant, _ in asked)
    _fill(queue, *(QueuedRequest(tenant, 0, float(cost)) for tenant, cost in asked))
    served = dict.fromkeys(left, 0.0)
    while all(left.values()):
        queued = queue.pop(now=0.0)
        left[queued.tenant] -= 1
        served[queued.tenant] += queued.cost
        assert max(served.values()) - min(served.values()) <= 2 * 20
