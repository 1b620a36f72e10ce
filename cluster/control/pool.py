"""The replicas of one role, and the lives that they lead."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from cluster.control.desired_state import Desired
from cluster.control.gang import Home
from cluster.control.pool_plan import STABLE_S, Backoff, plan_pool
from cluster.control.replica import Failure, ReplicaState, ReplicaStatus
from cluster.control.replica_lifecycle import ReplicaLifecycle
from cluster.control.report import PoolReport
from core.types.errors import ReplicaFailed
from core.types.request import Role

logger = logging.getLogger(__name__)

_KEPT_FAILURES = 5
_KEPT_TIMES = 10


@dataclass
class _Member:
    life: ReplicaLifecycle
    started_at: float
    left_at: float | None = None  # asked to drain
    task: asyncio.Task[None] | None = None

    @property
    def stays(self) -> bool:
        return self.life.view.state is not ReplicaState.DRAINING

    @property
    def start_s(self) -> float | None:
        """None: it does not serve yet, or an earlier life of the controller has started it."""
        since = self.life.serving_since
        return since - self.started_at if since is not None and not self.life.is_adopted else None

    def is_stable(self, now: float) -> bool:
        since = self.life.serving_since
        return since is not None and now - since >= STABLE_S


class ReplicaPool:
    """Owned by the controller's event loop. `changed` is called whenever a replica has come to its end."""

    def __init__(self, role: Role, *, changed: Callable[[], None]) -> None:
        self.role = role
        self._changed = changed
        self._members: dict[str, _Member] = {}
        self._backoff = Backoff()
        self._failures: deque[Failure] = deque(maxlen=_KEPT_FAILURES)
        self._failed_starts: Counter[str] = Counter()  # since all was well, by the node's name
        self._past_homes: dict[str, Home] = {}
        self._drain_times_s: deque[float] = deque(maxlen=_KEPT_TIMES)

    def reconcile(self, desired: Desired, new_id: Callable[[], str], *, count: int | None = None) -> None:
        """Start and retire until there are `count` (None: as many as the spec says). Starts at most what the backoff
        allows; never blocks."""
        wanted = desired.spec.pool(self.role).replicas if count is None else count
        now = time.monotonic()
        members = list(self._members.values())
        num_stable = sum(member.is_stable(now) for member in members if member.stays)
        if members and num_stable >= wanted:  # not while one is missing
            self.retry()
        plan = plan_pool(wanted, self.views, can_start=self._backoff.allows(now))
        for replica in plan.retire:
            self.retire(replica)
        for _ in range(plan.start):
            self.add(ReplicaLifecycle(new_id(), desired, failures=Counter(self._failed_starts)))

    def add(self, life: ReplicaLifecycle) -> None:
        """Let this one live: new, or adopted."""
        member = _Member(life, time.monotonic())
        self._members[life.view.id] = member
        member.task = asyncio.create_task(self._live(member))

    def retire(self, replica: str, *, successor: ReplicaLifecycle | None = None) -> None:
        """A replica that serves drains first; any other is removed at once. heir: who goes on with its processes."""
        member = self._members[replica]
        if member.life.view.state is ReplicaState.DRAINING and successor is None:
            return
        member.life.leave(successor)
        member.left_at = time.monotonic()
        if member.life.serving_since is None and member.task is not None:
            member.task.cancel()

    def retry(self) -> None:
        """Forget earlier failures to start: an operator has changed something, or all is well."""
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
        """Where a replica's logs are, also when it is gone."""
        life = self.get(replica)
        return life.home if life else self._past_homes.get(replica)

    @property
    def views(self) -> list[ReplicaStatus]:
        return [member.life.view for member in self._members.values()]

    @property
    def ids(self) -> list[str]:
        return list(self._members)

    @property
    def lives(self) -> list[ReplicaLifecycle]:
        return [member.life for member in self._members.values()]

    @property
    def num_draining(self) -> int:
        return sum(member.life.view.state is ReplicaState.DRAINING for member in self._members.values())

    @property
    def has_given_up(self) -> bool:
        return self._backoff.has_given_up

    @property
    def start_times_s(self) -> list[float]:
        """Of those that live: from being wanted until they served."""
        return [
            seconds for member in self._members.values() if (seconds := member.start_s) and not member.life.view.was
        ]

    @property
    def switch_times_s(self) -> list[float]:
        """The same of those that were of the other role, whose drain included."""
        return [seconds for member in self._members.values() if (seconds := member.start_s) and member.life.view.was]

    @property
    def drain_times_s(self) -> list[float]:
        """The last ones, of replicas that had served."""
        return list(self._drain_times_s)

    def report(self, desired: int) -> PoolReport:
        """The pool's part of `Controller.status`."""
        views = self.views
        return {
            "desired": desired,
            "ready": sum(view.state is ReplicaState.READY for view in views),
            "replicas": [view.report() for view in views],
            "failures": [failure.report() for failure in self._failures],
            "failed_rounds": self._backoff.rounds,
            "has_given_up": self._backoff.has_given_up,
        }

    async def _live(self, member: _Member) -> None:
        life = member.life
        try:
            await life.live()
            logger.info("%s has left", life.view.id)
        except ReplicaFailed as error:
            self._note_failure(member, str(error), will_repeat=error.will_repeat)
        except Exception as error:  # an edge: whatever goes wrong with one replica must not end the controller
            logger.exception("%s: unexpected", life.view.id)
            self._note_failure(member, f"{type(error).__name__}: {error}", will_repeat=False)
        finally:
            if member.left_at is not None and life.serving_since is not None:
                self._drain_times_s.append(time.monotonic() - member.left_at)
            if life.home:
                self._past_homes[life.view.id] = life.home
            del self._members[life.view.id]
            self._changed()

    def _note_failure(self, member: _Member, reason: str, *, will_repeat: bool) -> None:
        view, now = member.life.view, time.monotonic()
        failure = Failure(
            replica=view.id, role=self.role, state=view.state, node=view.node, reason=reason, will_repeat=will_repeat
        )
        logger.error("%s", failure.describe())
        self._failures.append(failure)
        if view.state is not ReplicaState.DRAINING and not member.is_stable(now):
            self._backoff.failed(started_at=member.started_at, now=now)
            self._failed_starts[view.node] += 1
