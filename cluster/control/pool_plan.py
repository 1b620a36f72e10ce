"""Which replicas to start, to retire, and to take over from the other pool: pure choices, so that they are tested
without a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.control.replica import ReplicaState, ReplicaStatus, number_of
from core.types.request import Role

# Least useful first: what serves nobody yet is the cheapest to lose.
_RETIRE_ORDER = (ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.LOADING, ReplicaState.READY)

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 60.0
_MAX_FAILED_ROUNDS = 10  # about five minutes of trying
STABLE_S = 60.0  # a replica that served for this long did not fail to start


@dataclass(frozen=True)
class PoolPlan:
    """What to do for one pool now."""

    start: int = 0
    retire: tuple[str, ...] = ()


@dataclass
class Backoff:
    """When a pool may try again to start a replica: after 1, 2, 4 … 60 s, and after ten rounds not at all.

    Replicas that were started together and fail together count as one round. All times are of one monotonic clock.
    """

    rounds: int = 0
    retry_at: float = 0.0
    _failed_at: float = -1.0

    def failed(self, *, started_at: float, now: float) -> None:
        if self.rounds and started_at < self._failed_at:
            return
        self.retry_at = now + min(_FIRST_DELAY_S * 2**self.rounds, _LONGEST_DELAY_S)
        self.rounds += 1
        self._failed_at = now

    def reset(self) -> None:
        """A replica serves, or an operator asks for another try."""
        self.rounds = 0
        self.retry_at = 0.0

    @property
    def has_given_up(self) -> bool:
        return self.rounds >= _MAX_FAILED_ROUNDS

    def allows(self, now: float) -> bool:
        return not self.has_given_up and now >= self.retry_at


def plan_pool(desired: int, replicas: Sequence[ReplicaStatus], *, can_start: bool) -> PoolPlan:
    """Compare what is wanted with what lives. Replicas that drain are on their way out: they count for nothing."""
    staying = [replica for replica in replicas if replica.state is not ReplicaState.DRAINING]
    surplus = len(staying) - desired
    if surplus > 0:
        return PoolPlan(retire=tuple(replica.id for replica in sorted(staying, key=_usefulness)[:surplus]))
    return PoolPlan(start=-surplus if can_start else 0)


def plan_switches(
    wanted: Mapping[Role, int], sizes: Mapping[Role, int], replicas: Mapping[Role, Sequence[ReplicaStatus]]
) -> list[str]:
    """Which replicas of a pool that shrinks become replicas of the one that grows: as many as both allow, of those that
    would be retired, and only such as serve.

    wanted: the new sizes of the pools that are named. sizes: what each pool should have had until now.
    """
    growth = {role: wanted.get(role, size) - size for role, size in sizes.items()}
    room, shrinking = max(growth.values()), min(growth, key=lambda role: growth[role])
    if growth[shrinking] >= 0:
        return []
    leaving = plan_pool(wanted[shrinking], replicas[shrinking], can_start=False).retire
    serving = {replica.id for replica in replicas[shrinking] if replica.state is ReplicaState.READY}
    return [replica for replica in leaving if replica in serving][: max(0, room)]


def _usefulness(replica: ReplicaStatus) -> tuple[int, int, int]:
    """Retired first: not yet serving, then the least busy, then the newest (its cache is the coldest)."""
    return _RETIRE_ORDER.index(replica.state), replica.running + replica.waiting, -number_of(replica.id)
