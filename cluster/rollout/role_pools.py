"""The replicas of one role, of every revision that there is: a pool for each."""

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
    """Of one revision's pool."""

    desired: Desired  # with that revision's spec
    count: int  # of replicas, now


class RolePools:
    """As one ReplicaPool, which it is while there is one revision. Owned by the controller's event loop."""

    def __init__(self, role: Role, *, make: int = 1, changed: Callable[[], None]) -> None:
        """make: the revision that makes its replicas, as long as there is one alone."""
        self.role = role
        self._changed = changed
        self._pools: dict[int, ReplicaPool] = {}  # by the revision that has made their replicas; also when it is gone
        self._newest = make  # of those that shall be

    def reconcile(self, goals: Mapping[int, Goal], new_id: Callable[[int], str]) -> None:
        """Start and retire what each revision's goal asks for, by number; of a revision without one all leave.

        new_id: of a replica that this revision makes.
        """
        for make in self._pools.keys() - goals.keys():
            for replica in self._pools[make].ids:
                self._pools[make].retire(replica)
        self._newest = max(goals, default=self._newest)
        for make, goal in goals.items():
            self.of(make).reconcile(goal.desired, lambda make=make: new_id(make), count=goal.count)  # type: ignore[misc]

    def of(self, make: int) -> ReplicaPool:
        """Of one revision."""
        if make not in self._pools:
            self._pools[make] = ReplicaPool(self.role, changed=self._changed)
        return self._pools[make]

    def add(self, life: ReplicaLifecycle, make: int | None = None) -> None:
        """Let this one live, which that revision has made; None: the newest."""
        self.of(self._newest if make is None else make).add(life)

    def retire(self, replica: str, *, successor: ReplicaLifecycle | None = None) -> None:
        """A replica that serves drains first; any other is removed at once. heir: who goes on with its processes."""
        for pool in self._pools.values():
            if pool.get(replica):
                pool.retire(replica, successor=successor)

    def retry(self) -> None:
        """Forget earlier failures to start."""
        for pool in self._pools.values():
            pool.retry()

    async def stop(self) -> None:
        """Remove every replica at once, without draining."""
        for pool in self._pools.values():
            await pool.stop()

    def get(self, replica: str) -> ReplicaLifecycle | None:
        return next((life for pool in self._pools.values() if (life := pool.get(replica))), None)

    def home(self, replica: str) -> Home | None:
        """Where a replica's logs are, also when it is gone."""
        return next((home for pool in self._pools.values() if (home := pool.home(replica))), None)

    @property
    def views(self) -> list[ReplicaStatus]:
        return [view for pool in self._pools.values() for view in pool.views]

    @property
    def ids(self) -> list[str]:
        return [replica for pool in self._pools.values() for replica in pool.ids]

    @property
    def num_draining(self) -> int:
        return sum(pool.num_draining for pool in self._pools.values())

    def is_changing(self, desired: int) -> bool:
        """Whether replicas come or go. Not where they fail to start, which may go on for ever."""
        views = self.views
        is_settled = len(views) == desired and all(view.state is ReplicaState.READY for view in views)
        return not is_settled and not any(pool.has_given_up for pool in self._pools.values())

    @property
    def start_times_s(self) -> list[float]:
        """Of those that live: from being wanted until they served."""
        return [seconds for pool in self._pools.values() for seconds in pool.start_times_s]

    @property
    def switch_times_s(self) -> list[float]:
        """The same of those that were of the other role, whose drain included."""
        return [seconds for pool in self._pools.values() for seconds in pool.switch_times_s]

    @property
    def drain_times_s(self) -> list[float]:
        """The last ones, of replicas that had served."""
        return [seconds for pool in self._pools.values() for seconds in pool.drain_times_s]

    def report(self, desired: int) -> PoolReport:
        """The role's part of `Controller.status`."""
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
    """The pool to which a replica belongs, or has belonged. Raises SpecError for any other name."""
    for pool in pools.values():
        if pool.get(replica) is not None or pool.home(replica) is not None:
            return pool
    known = ", ".join(replica for pool in pools.values() for replica in pool.ids)
    raise SpecError(f"no replica is called {replica}; there are: {known or 'none'}")
