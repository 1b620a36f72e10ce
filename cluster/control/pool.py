"""Replica pools: the replicas of one role, each with the revision that it was started from."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cluster.control.desired_state import Desired
from cluster.control.gang import Home
from cluster.control.pool_plan import StartHistory, plan_pool
from cluster.control.replica import PoolReport, ReplicaState, ReplicaStatus
from cluster.control.replica_lifecycle import ReplicaLifecycle
from core.types.errors import ReplicaFailed, SpecError
from core.types.request import Role

logger = logging.getLogger(__name__)

_KEPT_TIMES = 10


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
        self._lives: dict[str, ReplicaLifecycle] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # By revision; kept after the replicas have left.
        self._starts: defaultdict[int, StartHistory] = defaultdict(StartHistory)
        # Newest revision that has a goal.
        self._newest = make
        self._past_homes: dict[str, Home] = {}
        # Recent drain times of replicas that had served.
        self.drain_times_s: deque[float] = deque(maxlen=_KEPT_TIMES)

    def reconcile(self, goals: Mapping[int, Goal], new_id: Callable[[int], str]) -> None:
        """Start and retire replicas until each revision has its desired number, as far as its backoff allows.

        Replicas of revisions without a goal leave. Never blocks. new_id: returns the id for a new replica of the given
        revision.
        """
        for life in self.lives:
            if life.view.revision not in goals:
                self.retire(life.view.id)
        self._newest = max(goals, default=self._newest)
        now = time.monotonic()
        for make, goal in goals.items():
            lives, starts = self.lives_of(make), self.starts(make)
            num_stable = sum(life.is_stable(now) for life in lives if not life.is_leaving)
            # Count a success only if no replica is missing.
            if lives and num_stable >= goal.count:
                starts.reset()
            plan = plan_pool(goal.count, [life.view for life in lives], can_start=starts.allows(now))
            for replica in plan.retire:
                self.retire(replica)
            for _ in range(plan.start):
                self.add(ReplicaLifecycle(new_id(make), goal.desired, failures=Counter(starts.by_node)), make)

    def add(self, life: ReplicaLifecycle, make: int | None = None) -> None:
        """Add a new or an adopted replica and run it. make: its revision; None: the newest."""
        life.view.revision = self._newest if make is None else make
        self._lives[life.view.id] = life
        self._tasks[life.view.id] = asyncio.create_task(self._live(life))

    def retire(self, replica: str, *, successor: ReplicaLifecycle | None = None) -> None:
        """Drain a serving replica, or remove any other at once.

        successor: the replica that takes over its processes.
        """
        life = self._lives[replica]
        if life.is_leaving and successor is None:
            return
        life.leave(successor)
        life.left_at = time.monotonic()
        if life.serving_since is None:
            self._tasks[replica].cancel()

    def retry(self) -> None:
        """Reset the start backoff."""
        for starts in self._starts.values():
            starts.reset()

    async def stop(self) -> None:
        """Remove every replica at once, without draining."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def get(self, replica: str) -> ReplicaLifecycle | None:
        return self._lives.get(replica)

    def home(self, replica: str) -> Home | None:
        """Return the node with a replica's logs, also after it has left."""
        life = self.get(replica)
        return life.home if life else self._past_homes.get(replica)

    def lives_of(self, make: int) -> list[ReplicaLifecycle]:
        """Return the replicas of one revision."""
        return [life for life in self.lives if life.view.revision == make]

    def starts(self, make: int) -> StartHistory:
        """Return the failures of one revision's replicas."""
        return self._starts[make]

    @property
    def lives(self) -> list[ReplicaLifecycle]:
        return list(self._lives.values())

    @property
    def ids(self) -> list[str]:
        return list(self._lives)

    @property
    def views(self) -> list[ReplicaStatus]:
        return [life.view for life in self.lives]

    @property
    def has_draining(self) -> bool:
        return any(life.is_leaving for life in self.lives)

    def is_changing(self, desired: int) -> bool:
        """Return whether replicas are starting or leaving. False once a pool has given up starting them."""
        views = self.views
        is_settled = len(views) == desired and all(view.state is ReplicaState.READY for view in views)
        return not is_settled and not any(starts.has_given_up for starts in self._starts.values())

    @property
    def start_times_s(self) -> list[float]:
        """Start times of the current replicas: seconds from creation until serving, without role switches."""
        return [seconds for life in self.lives if (seconds := life.start_s) and not life.view.was]

    @property
    def switch_times_s(self) -> list[float]:
        """Role-switch times of the current replicas in seconds, including the drain."""
        return [seconds for life in self.lives if (seconds := life.start_s) and life.view.was]

    def report(self, desired: int) -> PoolReport:
        """Return the pool's part of `Controller.status`."""
        lives, newest = sorted(self.lives, key=lambda life: life.view.revision), self.starts(self._newest)
        return {
            "desired": desired,
            "ready": sum(view.state is ReplicaState.READY for view in self.views),
            "replicas": [life.view.report() for life in lives],
            "failures": [failure for starts in self._starts.values() for failure in starts.failures],
            "failed_rounds": newest.rounds,
            "has_given_up": newest.has_given_up,
        }

    async def _live(self, life: ReplicaLifecycle) -> None:
        try:
            await life.live()
            logger.info("replica left replica=%s", life.view.id)
        except ReplicaFailed as error:
            self._note_failure(life, str(error), will_repeat=error.will_repeat)
        except Exception as error:
            # Catch everything: one replica's failure must not end the controller.
            logger.exception("unexpected replica error replica=%s", life.view.id)
            self._note_failure(life, f"{type(error).__name__}: {error}", will_repeat=False)
        finally:
            if life.left_at is not None and life.serving_since is not None:
                self.drain_times_s.append(time.monotonic() - life.left_at)
            if life.home:
                self._past_homes[life.view.id] = life.home
            del self._lives[life.view.id], self._tasks[life.view.id]
            self._changed()

    def _note_failure(self, life: ReplicaLifecycle, reason: str, *, will_repeat: bool) -> None:
        view, starts, now = life.view, self.starts(life.view.revision), time.monotonic()
        where = f" on {view.node}" if view.node else ""
        outcome = "failed" if view.state in (ReplicaState.READY, ReplicaState.DRAINING) else "did not start"
        text = f"{view.id}{where} {outcome} ({view.state}): {reason}"
        logger.error("%s", text)
        starts.failures.append(
            {
                "replica": view.id,
                "role": view.role,
                "state": view.state,
                "node": view.node,
                "reason": reason,
                "will_repeat": will_repeat,
                "text": text,
            }
        )
        if not life.is_leaving and not life.is_stable(now):
            starts.start_failed(view.node, started_at=life.created_at, now=now)


def life_of(replica: str, pools: Mapping[Role, ReplicaPool]) -> ReplicaLifecycle:
    """Return a present replica. Raises SpecError if it has left or never existed."""
    life = pool_of(replica, pools).get(replica)
    if life is None:
        raise SpecError(f"{replica} has left already")
    return life


def pool_of(replica: str, pools: Mapping[Role, ReplicaPool]) -> ReplicaPool:
    """Return the pool that a replica belongs or belonged to. Raises SpecError for unknown names."""
    for pool in pools.values():
        if pool.get(replica) is not None or pool.home(replica) is not None:
            return pool
    known = ", ".join(replica for pool in pools.values() for replica in pool.ids)
    raise SpecError(f"replica {replica} not found; available: {known or 'none'}")
