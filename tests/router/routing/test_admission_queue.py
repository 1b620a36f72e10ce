"""Order of the admission queue, rejection at arrival, and tenants at their share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from core.types.errors import CapacityError
from core.types.request import OFFLINE
from router.routing.admission_queue import AdmissionQueue
from router.routing.fair_queue import NO_PLACES, Places, QueuedRequest

_LONG_S = 1e9


def _queue(*, max_waiting: int = 1000) -> AdmissionQueue:
    return AdmissionQueue(max_waiting=max_waiting, hold_s=_LONG_S)


def _fill(queue: AdmissionQueue, *requests: QueuedRequest) -> None:
    for request in requests:
        queue.add(request, within_s=_LONG_S, now=0.0)


def _pop(queue: AdmissionQueue, *, now: float) -> QueuedRequest | None:
    """Admit one request."""
    admitted: list[QueuedRequest] = []

    def take(queued: QueuedRequest) -> bool:
        if not admitted:
            admitted.append(queued)
            return True
        return False

    queue.run(take, now=now)
    return admitted[0] if admitted else None


def _drain(queue: AdmissionQueue, *, seconds_each: float = 1.0) -> list[QueuedRequest]:
    order, now = [], 0.0
    while queued := _pop(queue, now=(now := now + seconds_each)):
        order.append(queued)
    return order


def _busy() -> AdmissionQueue:
    """Return a queue that drains 10 tokens per second, with one waiting request of tenant "x"."""
    queue = _queue()
    _fill(queue, *(QueuedRequest("x", 0, 10.0) for _ in range(11)))
    for second in range(10):
        _pop(queue, now=float(second + 1))
    return queue


def test_one_tenant_goes_by_priority_and_then_by_arrival() -> None:
    queue = _queue()
    queued = [QueuedRequest("", priority, 1.0) for priority in (0, 5, -1, 0)]
    _fill(queue, *queued)
    assert _drain(queue) == [queued[2], queued[0], queued[3], queued[1]]


def test_a_flood_does_not_delay_another_tenant() -> None:
    queue = _queue()
    _fill(queue, *(QueuedRequest("flood", -100, 1.0) for _ in range(200)))
    _fill(queue, *(QueuedRequest("light", 0, 1.0) for _ in range(5)))
    assert Counter(queued.tenant for queued in _drain(queue)[:10]) == {"flood": 5, "light": 5}


def test_an_idle_tenant_saves_up_no_credit() -> None:
    queue = _queue()
    _fill(queue, *(QueuedRequest("steady", 0, 1.0) for _ in range(60)))
    for second in range(50):
        _pop(queue, now=float(second))
    _fill(queue, *(QueuedRequest("back", 0, 1.0) for _ in range(10)))
    assert Counter(queued.tenant for queued in _drain(queue)[:10])["steady"] >= 4


def test_one_tenant_leaves_half_of_the_queue_to_others() -> None:
    queue = _queue(max_waiting=10)
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
    queue.add(QueuedRequest("y", 0, 10.0), within_s=4.0, now=10.0)  # another tenant, with a separate share


def test_time_without_a_queue_does_not_count_as_slow() -> None:
    queue = _busy()
    _pop(queue, now=11.0)
    _fill_at = 10_000.0
    queue.add(QueuedRequest("x", 0, 10.0), within_s=_LONG_S, now=_fill_at)
    assert queue.wait_s(QueuedRequest("x", 0, 10.0)) == pytest.approx(1.0, rel=0.2)


def test_removed_requests_are_not_admitted() -> None:
    queue = _queue()
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
def test_every_request_is_admitted_once_or_removed(moves: list[tuple]) -> None:
    queue = _queue(max_waiting=40)
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
            head = _pop(queue, now=float(now))
            assert head
            own = [queued for queued in waiting if queued.tenant == head.tenant]
            assert not any(queued.key < head.key for queued in own)
            waiting.remove(head)
        elif move == "remove" and waiting:
            queue.remove(waiting.pop(arguments[0] % len(waiting)), now=float(now))
        assert len(queue) == len(waiting)


class Site:
    """Places for streams; requests take them when they are admitted, and give them back when they end."""

    def __init__(self, num_places: int, *, share: float) -> None:
        self.num_places = num_places
        self.now = 0.0
        self.waiting: list[QueuedRequest] = []
        self.running: list[QueuedRequest] = []
        self._share = share
        self.queue = AdmissionQueue(max_waiting=1000, share=lambda: share, free=self.free)

    def free(self) -> Places:
        taken = sum(queued.places.num_streams for queued in self.running)
        return Places(self.num_places - taken, 1000)

    def add(self, tenant: str, size: int, priority: int) -> None:
        queued = QueuedRequest(tenant, priority, float(size), places=Places(size, 0))
        self.queue.add(queued, within_s=_LONG_S, now=self.now)
        self.waiting.append(queued)

    def end(self, at: int) -> None:
        self.queue.release(self.running.pop(at % len(self.running)))

    def run(self) -> None:
        was_idle = not self.running
        self.queue.run(self._take, now=self.now)
        assert len(self.queue) == sum(queued.priority < OFFLINE for queued in self.waiting)
        assert not (was_idle and self.waiting and not self.running), "all places are free, and requests wait"
        for tenant in "abc":
            held = self.queue.held.get(tenant, NO_PLACES).num_streams
            assert held == sum(queued.places.num_streams for queued in self.running if queued.tenant == tenant)

    def _take(self, queued: QueuedRequest) -> bool:
        own, more, free = self.queue.held.get(queued.tenant, NO_PLACES), queued.places, self.free()
        most = self._share * (own.num_streams + free.num_streams)
        assert not own.num_streams or self._share == 1 or own.num_streams + more.num_streams <= most
        online = [other for other in self.waiting if other.priority < OFFLINE]
        if queued.priority >= OFFLINE:
            assert queued.tenant not in {other.tenant for other in online}
            assert all(self.queue.is_at_share(other.tenant) for other in online)
        if more.num_streams > free.num_streams:
            return False
        self.waiting.remove(queued)
        self.running.append(queued)
        return True


@example([("add", "a", 1, 0), ("add", "a", 1, 0), ("add", "a", 2, 0), ("add", "a", 1, 0), ("pass", 15)], 4, 0.5)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(1, 4), st.sampled_from([0, 1, OFFLINE])),
            st.tuples(st.sampled_from(["end", "remove", "pass"]), st.integers(0, 30)),
        ),
        max_size=60,
    ),
    st.integers(4, 12),
    st.sampled_from([0.5, 0.75, 1.0]),
)
def test_requests_are_admitted_within_shares_and_all_eventually(
    moves: list[tuple[Any, ...]], num_places: int, share: float
) -> None:
    site = Site(num_places, share=share)
    for move in moves:
        match move:
            case ("add", tenant, size, priority):
                site.add(tenant, size, priority)
            case ("end", at) if site.running:
                site.end(at)
            case ("remove", at) if site.waiting:
                site.queue.remove(site.waiting.pop(at % len(site.waiting)), now=site.now)
            case ("pass", at):
                site.now += at / 10
        site.run()
    for _ in range(10_000):
        if not (site.running or site.waiting):
            break
        if site.running:
            site.end(0)
        site.now += 0.5
        site.run()
    assert not site.waiting, "requests that never had their turn"
    assert (len(site.queue), site.queue.num_at_share, site.queue.held) == (0, 0, {})
    assert site.queue.changes_at() is None and not site.queue.is_blocked
