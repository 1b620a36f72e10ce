"""Replica pools: the replicas of one role, apart by the revision that they were started from."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.control.desired_state import Desired
from cluster.control.gang import Home
from cluster.control.pool_plan import STABLE_S, Backoff, plan_pool
from cluster.control.replica import Failure, ReplicaState, ReplicaStatus
from cluster.control.replica_lifecycle import ReplicaLifecycle
from cluster.control.report import PoolReport, ReplicaReport
from core.types.errors import ReplicaFailed, SpecError
from core.types.request import Role

logger = logging.getLogger(__name__)

_KEPT_FAILURES = 5
_KEPT_TIMES = 10


@dataclass
class Member:
    """Replica in a pool."""

    life: ReplicaLifecycle
    started_at: float
    # Time at which it was asked to drain.
    left_at: float | None = None
    task: asyncio.Task[None] | None = None

    @property
    def stays(self) -> bool:
        return self.life.view.state is not ReplicaState.DRAINING

    @property
    def start_s(self) -> float | None:
        """Seconds until it served; None if it does not serve yet or was adopted."""
        since = self.life.serving_since
        return since - self.started_at if since is not None and not self.life.is_adopted else None

    def is_stable(self, now: float) -> bool:
        since = self.life.serving_since
        return since is not None and now - since >= STABLE_S


class ReplicaPool:
    """Replicas of one role and revision, owned by the controller's event loop.

    Calls `changed` whenever a replica ends.
    """

    def __init__(self, role: Role, *, changed: Callable[[], None]) -> None:
        self.role = role
        self._changed = changed
        self._members: dict[str, Member] = {}
        self._backoff = Backoff()
        self._failures: deque[Failure] = deque(maxlen=_KEPT_FAILURES)
        # By node name, since the last reset.
        self._failed_starts: Counter[str] = Counter()
        self._past_homes: dict[str, Home] = {}
        # Recent drain times of replicas that had served.
        self.drain_times_s: deque[float] = deque(maxlen=_KEPT_TIMES)

    def reconcile(self, desired: Desired, new_id: Callable[[], str], *, count: int | None = None) -> None:
        """Start and retire replicas until there are `count` (None: as in the spec), as far as the backoff allows.

        Never blocks.
        """
        num_desired = desired.spec.pool(self.role).replicas if count is None else count
        now = time.monotonic()
        members = list(self._members.values())
        num_stable = sum(member.is_stable(now) for member in members if member.stays)
        # Only if none is missing.
        if members and num_stable >= num_desired:
            self.retry()
        plan = plan_pool(num_desired, self.views, can_start=self._backoff.allows(now))
        for replica in plan.retire:
            self.retire(replica)
        for _ in range(plan.start):
            self.add(ReplicaLifecycle(new_id(), desired, failures=Counter(self._failed_starts)))

    def add(self, life: ReplicaLifecycle) -> None:
        """Add a new or an adopted replica and run it."""
        member = Member(life, time.monotonic())
        self._members[life.view.id] = member
        member.task = asyncio.create_task(self._live(member))

    def retire(self, replica: str, *, successor: ReplicaLifecycle | None = None) -> None:
        """Drain a serving replica, or remove any other at once.

        successor: the replica that takes over its processes.
        """
        member = self._members[replica]
        if member.life.view.state is ReplicaState.DRAINING and successor is None:
            return
        member.life.leave(successor)
        member.left_at = time.monotonic()
        if member.life.serving_since is None and member.task is not None:
            member.task.cancel()

    def retry(self) -> None:
        """Reset the start backoff: an operator changed something, or all replicas are stable."""
        self._backoff.reset()
        self._failed_starts.clear()

    async def stop(self) -> None:
        """Remove every replica at once, without draining."""
        tasks = [member.task for member in self._members.values() if member.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def get(self, replica: str) -> ReplicaLifecycle | None:
        member = self._members.get(replica)
        return member.life if member else None

    def home(self, replica: str) -> Home | None:
        """Return where a replica's logs are, also after it has left."""
        life = self.get(replica)
        return life.home if life else self._past_homes.get(replica)

    @property
    def views(self) -> list[ReplicaStatus]:
        return [member.life.view for member in self._members.values()]

    @property
    def ids(self) -> list[str]:
        return list(self._members)

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def has_given_up(self) -> bool:
        return self._backoff.has_given_up

    def report(self, desired: int) -> PoolReport:
        """Return the pool's part of `Controller.status`."""
        views = self.views
        return {
            "desired": desired,
            "ready": sum(view.state is ReplicaState.READY for view in views),
            "replicas": [view.report() for view in views],
            "failures": [failure.report() for failure in self._failures],
            "failed_rounds": self._backoff.rounds,
            "has_given_up": self._backoff.has_given_up,
        }

    async def _live(self, member: Member) -> None:
        life = member.life
        try:
            await life.live()
            logger.info("replica left replica=%s", life.view.id)
        except ReplicaFailed as error:
            self._note_failure(member, str(error), will_repeat=error.will_repeat)
        except Exception as error:
            # Catch everything: one replica's failure must not end the controller.
            logger.exception("unexpected replica error replica=%s", life.view.id)
            self._note_failure(member, f"{type(error).__name__}: {error}", will_repeat=False)
        finally:
            if member.left_at is not None and life.serving_since is not None:
                self.drain_times_s.append(time.monotonic() - member.left_at)
            if life.home:
                self._past_homes[life.view.id] = life.home
            del self._members[life.view.id]
            self._changed()

    def _note_failure(self, member: Member, reason: str, *, will_repeat: bool) -> None:
        view, now = member.life.view, time.monotonic()
        failure = Failure(
            replica=view.id, role=self.role, state=view.state, node=view.node, reason=reason, will_repeat=will_repeat
        )
        logger.error("%s", failure.describe())
        self._failures.append(failure)
        if view.state is not ReplicaState.DRAINING and not member.is_stable(now):
            self._backoff.failed(started_at=member.started_at, now=now)
            self._failed_starts[view.node] += 1


@dataclass(frozen=True)
class Goal:
    """Desired size of one revision's pool."""

    # Desired state with that revision's spec.
    desired: Desired
    count: int  # replicas


class RolePools:
    """Pools of one role, one per revision. Owned by the controller's event loop."""

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
        return [member.life.view for member in self._members]

    @property
    def ids(self) -> list[str]:
        return [view.id for view in self.views]

    @property
    def records(self) -> list[bytes]:
        """Signed records of the replicas that serve."""
        return [member.life.member for member in self._members if member.life.member]

    @property
    def num_draining(self) -> int:
        return sum(not member.stays for member in self._members)

    def is_changing(self, desired: int) -> bool:
        """Return whether replicas are starting or leaving. False once a pool has given up starting them."""
        views = self.views
        is_settled = len(views) == desired and all(view.state is ReplicaState.READY for view in views)
        return not is_settled and not any(pool.has_given_up for pool in self._pools.values())

    @property
    def start_times_s(self) -> list[float]:
        """Start times of the current replicas: seconds from creation until serving, without role switches."""
        return [seconds for member in self._members if (seconds := member.start_s) and not member.life.view.was]

    @property
    def switch_times_s(self) -> list[float]:
        """Role-switch times of the current replicas in seconds, including the drain."""
        return [seconds for member in self._members if (seconds := member.start_s) and member.life.view.was]

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

    @property
    def _members(self) -> list[Member]:
        return [member for pool in self._pools.values() for member in pool.members]


def pool_of(replica: str, pools: Mapping[Role, RolePools]) -> RolePools:
    """Return the pool that a replica belongs or belonged to. Raises SpecError for unknown names."""
    for pool in pools.values():
        if pool.get(replica) is not None or pool.home(replica) is not None:
            return pool
    known = ", ".join(replica for pool in pools.values() for replica in pool.ids)
    raise SpecError(f"replica {replica} not found; available: {known or 'none'}")
