"""Replica pools: the replicas of one role, each with the revision that it was started from."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.control.desired_state import Desired
from cluster.control.gang import Home
from cluster.control.pool_plan import STABLE_S, Backoff, plan_pool
from cluster.control.replica import FailureReport, PoolReport, ReplicaReport, ReplicaState, ReplicaStatus
from cluster.control.replica_lifecycle import ReplicaLifecycle
from core.types.errors import ReplicaFailed, SpecError
from core.types.request import Role

logger = logging.getLogger(__name__)

_KEPT_FAILURES = 5
_KEPT_TIMES = 10


@dataclass
class Member:
    """Replica in a pool."""

    life: ReplicaLifecycle
    make: int  # revision that it was started from
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


@dataclass
class StartRecord:
    """Failed starts of one revision's replicas."""

    backoff: Backoff = field(default_factory=Backoff)
    failures: deque[FailureReport] = field(default_factory=lambda: deque(maxlen=_KEPT_FAILURES))
    # Failed starts by node name, since the last reset.
    by_node: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        """Allow starts at once: an operator changed something, or all replicas are stable."""
        self.backoff.reset()
        self.by_node.clear()


@dataclass(frozen=True)
class Goal:
    """Desired size of one revision's part of a pool."""

    # Desired state with that revision's spec.
    desired: Desired
    count: int  # replicas


class ReplicaPool:
    """Replicas of one role and of all revisions, owned by the controller's event loop.

    Calls `changed` whenever a replica ends.
    """

    def __init__(self, role: Role, *, make: int = 1, changed: Callable[[], None]) -> None:
        """make: revision of the replicas while there is only one revision."""
        self.role = role
        self._changed = changed
        self._members: dict[str, Member] = {}
        # By revision. Records stay after their replicas have left.
        self._starts: defaultdict[int, StartRecord] = defaultdict(StartRecord)
        # Newest revision that has a goal.
        self._newest = make
        self._past_homes: dict[str, Home] = {}
        # Recent drain times of replicas that had served.
        self.drain_times_s: deque[float] = deque(maxlen=_KEPT_TIMES)

    def reconcile(self, goals: Mapping[int, Goal], new_id: Callable[[int], str]) -> None:
        """Start and retire replicas until each revision has its number of them, as far as its backoff allows.

        Replicas of revisions without a goal leave. Never blocks. new_id: returns the id for a new replica of the given
        revision.
        """
        for member in self.members:
            if member.make not in goals:
                self.retire(member.life.view.id)
        self._newest = max(goals, default=self._newest)
        now = time.monotonic()
        for make, goal in goals.items():
            members, starts = self.members_of(make), self.starts(make)
            num_stable = sum(member.is_stable(now) for member in members if member.stays)
            # Only if none is missing.
            if members and num_stable >= goal.count:
                starts.reset()
            views = [member.life.view for member in members]
            plan = plan_pool(goal.count, views, can_start=starts.backoff.allows(now))
            for replica in plan.retire:
                self.retire(replica)
            for _ in range(plan.start):
                self.add(ReplicaLifecycle(new_id(make), goal.desired, failures=Counter(starts.by_node)), make)

    def add(self, life: ReplicaLifecycle, make: int | None = None) -> None:
        """Add a new or an adopted replica and run it. make: its revision; None: the newest."""
        member = Member(life, self._newest if make is None else make, time.monotonic())
        self._members[life.view.id] = member
        member.task = asyncio.create_task(self._live(member))

    def retire(self, replica: str, *, successor: ReplicaLifecycle | None = None) -> None:
        """Drain a serving replica, or remove any other at once.

        successor: the replica that takes over its processes.
        """
        member = self._members[replica]
        if not member.stays and successor is None:
            return
        member.life.leave(successor)
        member.left_at = time.monotonic()
        if member.life.serving_since is None and member.task is not None:
            member.task.cancel()

    def retry(self) -> None:
        """Reset the start backoff."""
        for starts in self._starts.values():
            starts.reset()

    async def stop(self) -> None:
        """Remove every replica at once, without draining."""
        tasks = [member.task for member in self.members if member.task is not None]
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

    def members_of(self, make: int) -> list[Member]:
        """Return the replicas of one revision."""
        return [member for member in self.members if member.make == make]

    def starts(self, make: int) -> StartRecord:
        """Return the failed starts of one revision."""
        return self._starts[make]

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def ids(self) -> list[str]:
        return list(self._members)

    @property
    def views(self) -> list[ReplicaStatus]:
        return [member.life.view for member in self.members]

    @property
    def records(self) -> list[bytes]:
        """Signed records of the replicas that serve."""
        return [member.life.member for member in self.members if member.life.member]

    @property
    def num_draining(self) -> int:
        return sum(not member.stays for member in self.members)

    def is_changing(self, desired: int) -> bool:
        """Return whether replicas are starting or leaving. False once a pool has given up starting them."""
        views = self.views
        is_settled = len(views) == desired and all(view.state is ReplicaState.READY for view in views)
        return not is_settled and not any(starts.backoff.has_given_up for starts in self._starts.values())

    @property
    def start_times_s(self) -> list[float]:
        """Start times of the current replicas: seconds from creation until serving, without role switches."""
        return [seconds for member in self.members if (seconds := member.start_s) and not member.life.view.was]

    @property
    def switch_times_s(self) -> list[float]:
        """Role-switch times of the current replicas in seconds, including the drain."""
        return [seconds for member in self.members if (seconds := member.start_s) and member.life.view.was]

    def report(self, desired: int) -> PoolReport:
        """Return the pool's part of `Controller.status`."""
        members, backoff = sorted(self.members, key=lambda member: member.make), self.starts(self._newest).backoff
        replicas: list[ReplicaReport] = [{**member.life.view.report(), "revision": member.make} for member in members]
        return {
            "desired": desired,
            "ready": sum(view.state is ReplicaState.READY for view in self.views),
            "replicas": replicas,
            "failures": [failure for starts in self._starts.values() for failure in starts.failures],
            "failed_rounds": backoff.rounds,
            "has_given_up": backoff.has_given_up,
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
        view, starts, now = member.life.view, self.starts(member.make), time.monotonic()
        failure = _failure_of(view, reason, will_repeat=will_repeat)
        logger.error("%s", failure["text"])
        starts.failures.append(failure)
        if member.stays and not member.is_stable(now):
            starts.backoff.failed(started_at=member.started_at, now=now)
            starts.by_node[view.node] += 1


def _failure_of(view: ReplicaStatus, reason: str, *, will_repeat: bool) -> FailureReport:
    """Describe a failure of a replica in its present state."""
    where = f" on {view.node}" if view.node else ""
    outcome = "failed" if view.state in (ReplicaState.READY, ReplicaState.DRAINING) else "did not start"
    return {
        "replica": view.id,
        "role": view.role,
        "state": view.state,
        "node": view.node,
        "reason": reason,
        "will_repeat": will_repeat,
        "text": f"{view.id}{where} {outcome} ({view.state}): {reason}",
    }


def pool_of(replica: str, pools: Mapping[Role, ReplicaPool]) -> ReplicaPool:
    """Return the pool that a replica belongs or belonged to. Raises SpecError for unknown names."""
    for pool in pools.values():
        if pool.get(replica) is not None or pool.home(replica) is not None:
            return pool
    known = ", ".join(replica for pool in pools.values() for replica in pool.ids)
    raise SpecError(f"replica {replica} not found; available: {known or 'none'}")
