"""Replicas that one router knows, and the index of the blocks that they hold."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator

from core.index.membership import Member
from core.index.prefix_index import PrefixIndex
from core.process.supervisor import Supervisor
from core.types.errors import ModelUnavailable
from core.types.request import Role
from router.serving.replica import Replica
from router.serving.worker import Worker

logger = logging.getLogger(__name__)


class Replicas:
    """All replicas. Lives on the event loop; `router.serving.discovery` keeps it up to date."""

    def __init__(
        self, connect: Callable[[Member], Worker], *, tasks: Supervisor | None = None, model: str = ""
    ) -> None:
        """tasks: among which those are that follow each replica; None: by themselves. model: what clients call it."""
        self.availability = Availability(self.may_answer, model=model)
        self._tasks = tasks or Supervisor()
        self.index = PrefixIndex()
        self.on_change: Callable[[], None] = lambda: None  # called at each report of any replica
        self._connect = connect
        self._replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()
        self._next_stream = 1

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def usable(self, role: Role) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.member.role is role and replica.is_usable]

    def answerers(self) -> Iterator[Replica]:
        """Yield the replicas that finish answers: decode replicas, and prefill replicas that take guests."""
        yield from self.usable(Role.DECODE)
        yield from (replica for replica in self.usable(Role.PREFILL) if replica.member.max_local_decodes)

    def may_answer(self) -> bool:
        return any(True for _ in self.answerers())

    def num_usable(self, role: Role) -> int:
        return len(self.usable(role))

    def get(self, replica: str) -> Replica | None:
        return self._replicas.get(replica)

    def new_streams(self, count: int) -> int:
        """Return the first of `count` stream keys that no other request of this router has, on any replica."""
        first = self._next_stream
        self._next_stream += count
        return first

    async def changed(self, *, timeout_s: float) -> None:
        """Wait for a report of any replica. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._changed.wait()

    def add(self, member: Member) -> None:
        self._replicas[member.replica] = Replica(member, self._connect(member), on_change=self._wake, tasks=self._tasks)
        logger.info("replica found replica=%s address=%s", member.replica, member.address)

    def remove(self, replica: str) -> None:
        self._replicas.pop(replica).forget()
        logger.info("replica gone replica=%s", replica)

    async def close(self) -> None:
        """Leave all replicas; requests that wait for one get an error."""
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        self._wake()  # also where there was none

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()


class Availability:
    """Time for which a model has had no replica that answers, as far as a look has found it so."""

    def __init__(self, may_answer: Callable[[], bool], *, model: str) -> None:
        """may_answer: whether a replica answers now. model: what clients call it."""
        self._may_answer = may_answer
        self._model = model
        self._now = asyncio.get_running_loop().time
        self._since: float | None = None
        self._has_ended = False

    def look(self) -> float | None:
        """Return the seconds since a look first found no replica that answers; None: there is one."""
        if self._may_answer():
            self._since = None
            return None
        now = self._now()
        self._since = now if self._since is None else self._since
        return now - self._since

    def check(self, *, within_s: float = math.inf) -> None:
        """Raises ModelUnavailable where there has been none for longer, or the router has left the model."""
        if self._has_ended or (within_s < math.inf and (self.look() or 0.0) > within_s):
            raise self.error()

    def end(self) -> None:
        """Note that this router leaves the model, so no request need wait for a replica."""
        self._has_ended = True

    def error(self) -> ModelUnavailable:
        called = f"model {self._model!r}" if self._model else "this model"
        why = "this router leaves it" if self._has_ended else "it has no decode replica"
        return ModelUnavailable(f"{called} cannot be served at present: {why}", retry_after_s=1.0)
