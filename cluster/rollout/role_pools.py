"""Replica pools of one role, one pool per revision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.control.desired_state import Desired
from cluster.control.gang import Home
from cluster.control.pool import ReplicaPool
from cluster.control.replica import ReplicaState, ReplicaStatus
from cluster.control.replica_lifecycle import ReplicaLifecycle
from cluster.control.report import PoolReport, ReplicaReport
from core.types.errors import SpecError
from core.types.request import Role


@dataclass(frozen=True)
class Goal:
    """Desired size of one revision's pool."""

    # Desired state with that revision's spec.
    desired: Desired
    count: int  # replicas


class RolePools:
    """Pools of one role, with the interface of a single ReplicaPool. Owned by the controller's event loop."""

    def __init__(self, role: Role, *, make: int = 1, changed: Callable[[], None]) -> None:
        """make: revision of the replicas while there is only one revision."""
        self.role = role
        self._changed = changed
        # By the revision that made the replicas. Pools stay after their replicas have left.
        self._pools: dict[int, ReplicaPool] = {}
        # Newest revision that has a goal.
        self._newest = make

    def reconcile(self, goals: Mapping[int, Goal], new_id: Callable[[int], str]) -> None:
        """Bring each revision's pool to its goal; replicas of revisions without a goal leave.

        new_id: returns the id for a new replica of the given revision.
        """
        for make in self._pools.keys() - goals.keys():
            for replica in self._pools[make].ids:
                self._pools[make].retire(replica)
        self._newest = max(goals, default=self._newest)
        for make, goal in goals.items():
            self.of(make).reconcile(goal.desired, lambda make=make: new_id(make), count=goal.count)  # type: ignore[misc]

    def of(self, make: int) -> ReplicaPool:
        """Return the pool of one revision."""
        if make not in self._pools:
            self._pools[make] = ReplicaPool(self.role, changed=self._changed)
        return self._pools[make]

    def add(self, life: ReplicaLifecycle, make: int | None = None) -> None:
        """Add a replica made by revision `make`; None: the newest."""
        self.of(self._newest if make is None else make).add(life)

    def retire(self, replica: str, *, successor: ReplicaLifecycle | None = None) -> None:
        """Drain a serving replica, or remove any other at once.

        successor: the replica that takes over its processes.
        """
        for pool in self._pools.values():
            if pool.get(replica):
                pool.retire(replica, successor=successor)

    def retry(self) -> None:
        """Reset the start backoff."""
        for pool in self._pools.values():
            pool.retry()

    async def stop(self) -> None:
        """Remove every replica at once, without draining."""
        for pool in self._pools.values():
            await pool.stop()

    def get(self, replica: str) -> ReplicaLifecycle | None:
        return next((life for pool in self._pools.values() if (life := pool.get(replica))), None)

    def home(self, replica: str) -> Home | None:
        """Return where a replica's logs are, also after it has left."""
        return next((home for pool in self._pools.values() if (home := pool.home(replica))), None)

    @property
    def views(self) -> list[ReplicaStatus]:
        return [view for pool in self._pools.values() for view in pool.views]

    @property
    def ids(self) -> list[str]:
        return [replica for pool in self._pools.values() for replica in pool.ids]

    @property
    def members(self) -> list[bytes]:
        """Signed records of the replicas that serve."""
        return [member for pool in self._pools.values() for member in pool.members]

    @property
    def num_draining(self) -> int:
        return sum(pool.num_draining for pool in self._pools.values())

    def is_changing(self, desired: int) -> bool:
        """Return whether replicas are starting or leaving. False once a pool has given up starting them."""
        views = self.views
        is_settled = len(views) == desired and all(view.state is ReplicaState.READY for view in views)
        return not is_settled and not any(pool.has_given_up for pool in self._pools.values())

    @property
    def start_times_s(self) -> list[float]:
        """Start times of the current replicas: seconds from creation until serving, without role switches."""
        return [seconds for pool in self._pools.values() for seconds in pool.start_times_s]

    @property
    def switch_times_s(self) -> list[float]:
        """Role-switch times of the current replicas in seconds, including the drain."""
        return [seconds for pool in self._pools.values() for seconds in pool.switch_times_s]

    @property
    def drain_times_s(self) -> list[float]:
        """Recent drain times in seconds, of replicas that had served."""
        return [seconds for pool in self._pools.values() for seconds in pool.drain_times_s]

    def report(self, desired: int) -> PoolReport:
        """Return the role's part of `Controller.status`."""
        reports = {make: pool.report(desired) for make, pool in self._pools.items()}
        newest = reports.get(self._newest) or ReplicaPool(self.role, changed=self._changed).report(desired)
        replicas: list[ReplicaReport] = [
            {**one, "revision": make} for make in sorted(reports) for one in reports[make]["replicas"]
        ]
        return {
            "desired": desired,
            "ready": sum(report["ready"] for report in reports.values()),
            "replicas": replicas,
            "failures": [failure for report in reports.values() for failure in report["failures"]],
            "failed_rounds": newest["failed_rounds"],
            "has_given_up": newest["has_given_up"],
        }


def pool_of(replica: str, pools: Mapping[Role, RolePools]) -> RolePools:
    """Return the pool that a replica belongs or belonged to. Raises SpecError for unknown names."""
    for pool in pools.values():
        if pool.get(replica) is not None or pool.home(replica) is not None:
            return pool
    known = ", ".join(replica for pool in pools.values() for replica in pool.ids)
    raise SpecError(f"replica {replica} not found; available: {known or 'none'}")
