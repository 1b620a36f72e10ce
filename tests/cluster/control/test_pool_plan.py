"""Which replicas to start and which to retire."""

from __future__ import annotations

from cluster.control.pool_plan import Backoff, PoolPlan, plan_pool, plan_switches
from cluster.control.replica import ReplicaState, ReplicaStatus
from core.types.request import Role


def replica(number: int, state: str = "ready", *, running: int = 0) -> ReplicaStatus:
    return ReplicaStatus(id=f"decode-{number}", role=Role.DECODE, state=ReplicaState(state), running=running)


def test_what_is_missing_is_started() -> None:
    assert plan_pool(3, [replica(0), replica(1, "loading")], can_start=True) == PoolPlan(start=1)
    assert plan_pool(3, [replica(0)], can_start=False) == PoolPlan()
    assert plan_pool(1, [replica(0)], can_start=True) == PoolPlan()


def test_a_draining_replica_counts_for_nothing() -> None:
    assert plan_pool(1, [replica(0, "draining")], can_start=True) == PoolPlan(start=1)
    assert plan_pool(0, [replica(0, "draining")], can_start=True) == PoolPlan()


def test_the_least_useful_are_retired() -> None:
    pool = [replica(0), replica(1, "loading"), replica(2, "pending"), replica(3, running=2), replica(4), replica(5)]
    retired = plan_pool(0, pool, can_start=True).retire
    assert retired == tuple(f"decode-{n}" for n in (2, 1, 5, 4, 0, 3))
    assert plan_pool(4, pool, can_start=True).retire == retired[:2]


def test_the_newest_is_by_number_not_by_spelling() -> None:
    assert plan_pool(1, [replica(9), replica(10)], can_start=True).retire == ("decode-10",)


def test_failed_rounds_double_the_wait_up_to_a_minute() -> None:
    backoff, now, waits = Backoff(), 0.0, []
    while not backoff.has_given_up:
        backoff.failed(started_at=now, now=now)
        assert not backoff.allows(now)
        waits.append(backoff.retry_at - now)
        now = backoff.retry_at
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert not backoff.allows(now + 1e6)
    backoff.reset()
    assert backoff.allows(now)


def test_what_was_started_together_fails_as_one_round() -> None:
    backoff = Backoff()
    for now in (5.0, 5.1, 5.2):
        backoff.failed(started_at=0.0, now=now)
    assert backoff.rounds == 1
    backoff.failed(started_at=6.0, now=7.0)
    assert backoff.rounds == 2


def prefill(number: int, state: str = "ready") -> ReplicaStatus:
    return ReplicaStatus(id=f"prefill-{number}", role=Role.PREFILL, state=ReplicaState(state))


def test_a_replica_that_would_be_retired_goes_to_the_pool_that_grows() -> None:
    pools = {Role.PREFILL: [prefill(0), prefill(1)], Role.DECODE: [replica(0), replica(1), replica(2, running=1)]}
    sizes = {Role.PREFILL: 2, Role.DECODE: 3}
    for wanted, switching in (
        ({Role.PREFILL: 3, Role.DECODE: 2}, ["decode-1"]),
        ({Role.PREFILL: 3, Role.DECODE: 1}, ["decode-1"]),  # and decode-0 leaves
        ({Role.PREFILL: 9, Role.DECODE: 1}, ["decode-1", "decode-0"]),
        ({Role.PREFILL: 1, Role.DECODE: 4}, ["prefill-1"]),
        ({Role.DECODE: 2}, []),
        ({Role.PREFILL: 3, Role.DECODE: 4}, []),
        ({Role.PREFILL: 1, Role.DECODE: 2}, []),
        ({}, []),
    ):
        assert plan_switches(wanted, sizes, pools) == switching, wanted


def test_what_does_not_serve_yet_is_replaced() -> None:
    pools = {Role.PREFILL: [prefill(0)], Role.DECODE: [replica(0), replica(1, "loading"), replica(2, "draining")]}
    sizes = {Role.PREFILL: 1, Role.DECODE: 2}
    assert plan_switches({Role.PREFILL: 2, Role.DECODE: 1}, sizes, pools) == []
    assert plan_switches({Role.PREFILL: 3, Role.DECODE: 0}, sizes, pools) == ["decode-0"]
