"""Decisions about replicas to start, retire and switch."""

from __future__ import annotations

from cluster.control.pool_plan import PoolPlan, StartHistory, plan_pool, plan_switches
from cluster.control.replica import ReplicaState, ReplicaStatus
from core.types.request import Role


def replica(number: int, state: str = "ready", *, role: Role = Role.DECODE, running: int = 0) -> ReplicaStatus:
    return ReplicaStatus(id=f"{role}-{number}", state=ReplicaState(state), running=running)


def test_missing_replicas_are_started() -> None:
    assert plan_pool(3, [replica(0), replica(1, "loading")], can_start=True) == PoolPlan(start=1)
    assert plan_pool(3, [replica(0)], can_start=False) == PoolPlan()
    assert plan_pool(1, [replica(0)], can_start=True) == PoolPlan()
    # Draining ones are not counted.
    assert plan_pool(1, [replica(0, "draining")], can_start=True) == PoolPlan(start=1)
    assert plan_pool(0, [replica(0, "draining")], can_start=True) == PoolPlan()


def test_least_useful_replicas_are_retired() -> None:
    pool = [replica(0), replica(1, "loading"), replica(2, "pending"), replica(3, running=2), replica(4), replica(5)]
    retired = plan_pool(0, pool, can_start=True).retire
    assert retired == tuple(f"decode-{n}" for n in (2, 1, 5, 4, 0, 3))
    assert plan_pool(4, pool, can_start=True).retire == retired[:2]
    # The newest is the one with the highest number.
    assert plan_pool(1, [replica(9), replica(10)], can_start=True).retire == ("decode-10",)


def test_backoff_doubles_up_to_a_minute() -> None:
    backoff, now, waits = StartHistory(), 0.0, []
    while not backoff.has_given_up:
        backoff.start_failed(started_at=now, now=now)
        assert not backoff.allows(now)
        waits.append(backoff.retry_at - now)
        now = backoff.retry_at
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert not backoff.allows(now + 1e6)
    backoff.reset()
    assert backoff.allows(now)


def test_joint_failures_count_as_one_round() -> None:
    backoff = StartHistory()
    for now in (5.0, 5.1, 5.2):
        backoff.start_failed(started_at=0.0, now=now)
    assert backoff.rounds == 1
    backoff.start_failed(started_at=6.0, now=7.0)
    assert backoff.rounds == 2


def test_retired_replica_switches_to_the_growing_pool() -> None:
    pools = {
        Role.PREFILL: [replica(0, role=Role.PREFILL), replica(1, role=Role.PREFILL)],
        Role.DECODE: [replica(0), replica(1), replica(2, running=1)],
    }
    sizes = {Role.PREFILL: 2, Role.DECODE: 3}
    for new_sizes, switching in (
        ({Role.PREFILL: 3, Role.DECODE: 2}, ["decode-1"]),
        ({Role.PREFILL: 3, Role.DECODE: 1}, ["decode-1"]),  # decode-0 is retired
        ({Role.PREFILL: 9, Role.DECODE: 1}, ["decode-1", "decode-0"]),
        ({Role.PREFILL: 1, Role.DECODE: 4}, ["prefill-1"]),
        ({Role.DECODE: 2}, []),
        ({Role.PREFILL: 3, Role.DECODE: 4}, []),
        ({Role.PREFILL: 1, Role.DECODE: 2}, []),
        ({}, []),
    ):
        assert plan_switches(new_sizes, sizes, pools) == switching, new_sizes


def test_starting_replica_does_not_switch() -> None:
    pools = {
        Role.PREFILL: [replica(0, role=Role.PREFILL)],
        Role.DECODE: [replica(0), replica(1, "loading"), replica(2, "draining")],
    }
    sizes = {Role.PREFILL: 1, Role.DECODE: 2}
    assert plan_switches({Role.PREFILL: 2, Role.DECODE: 1}, sizes, pools) == []
    assert plan_switches({Role.PREFILL: 3, Role.DECODE: 0}, sizes, pools) == ["decode-0"]
