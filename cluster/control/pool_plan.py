"""Pure decisions about a pool: which replicas to start, retire or switch to the other role."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.control.replica import FailureReport, ReplicaState, ReplicaStatus, number_of
from core.types.request import Role

# Least useful first: a replica that does not serve yet is the cheapest to lose.
_RETIRE_ORDER = (ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.LOADING, ReplicaState.READY)

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 60.0
_MAX_FAILED_ROUNDS = 10  # about five minutes of trying
_KEPT_FAILURES = 5
# A replica that served this long did not fail to start.
STABLE_S = 60.0


@dataclass(frozen=True)
class PoolPlan:
    """Number of replicas to start, and ids of replicas to retire."""

    start: int = 0
    retire: tuple[str, ...] = ()


@dataclass
class StartHistory:
    """Failures of a pool's replicas, and their start backoff: 1, 2, 4 ... 60 s; it gives up after ten failed rounds.

    Replicas that were started together and fail together count as one round. All times are from one monotonic clock.
    """

    rounds: int = 0
    retry_at: float = 0.0
    # Failed starts by node name, since the last reset.
    by_node: Counter[str] = field(default_factory=Counter)
    # The last few, oldest first, also of replicas that served.
    failures: deque[FailureReport] = field(default_factory=lambda: deque(maxlen=_KEPT_FAILURES))
    _failed_at: float = -1.0

    def start_failed(self, node: str = "", *, started_at: float, now: float) -> None:
        self.by_node[node] += 1
        if self.rounds and started_at < self._failed_at:
            return
        self.retry_at = now + min(_FIRST_DELAY_S * 2**self.rounds, _LONGEST_DELAY_S)
        self.rounds += 1
        self._failed_at = now

    def reset(self) -> None:
        """Allow starts at once: an operator changed something, or all replicas are stable."""
        self.rounds = 0
        self.retry_at = 0.0
        self.by_node.clear()

    @property
    def has_given_up(self) -> bool:
        return self.rounds >= _MAX_FAILED_ROUNDS

    def allows(self, now: float) -> bool:
        return not self.has_given_up and now >= self.retry_at


def plan_pool(desired: int, replicas: Sequence[ReplicaStatus], *, can_start: bool) -> PoolPlan:
    """Compare the desired count with the replicas. Draining ones are not counted."""
    staying = [replica for replica in replicas if replica.state is not ReplicaState.DRAINING]
    surplus = len(staying) - desired
    if surplus > 0:
        return PoolPlan(retire=tuple(replica.id for replica in sorted(staying, key=_usefulness)[:surplus]))
    return PoolPlan(start=-surplus if can_start else 0)


def plan_switches(
    new_sizes: Mapping[Role, int], sizes: Mapping[Role, int], replicas: Mapping[Role, Sequence[ReplicaStatus]]
) -> list[str]:
    """Return the replicas of the shrinking pool that switch to the growing one.

    Only serving replicas that would be retired switch, and at most as many as the other pool gains. new_sizes: new
    sizes of the named pools. sizes: previous desired size of each pool.
    """
    growth = {role: new_sizes.get(role, size) - size for role, size in sizes.items()}
    room, shrinking = max(growth.values()), min(growth, key=lambda role: growth[role])
    if growth[shrinking] >= 0:
        return []
    leaving = plan_pool(new_sizes[shrinking], replicas[shrinking], can_start=False).retire
    serving = {replica.id for replica in replicas[shrinking] if replica.state is ReplicaState.READY}
    return [replica for replica in leaving if replica in serving][: max(0, room)]


def _usefulness(replica: ReplicaStatus) -> tuple[int, int, int]:
    """Return the sort key for retirement: not serving first, then least busy, then newest (coldest cache)."""
    return _RETIRE_ORDER.index(replica.state), replica.running + replica.waiting, -number_of(replica.id)
