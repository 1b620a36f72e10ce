"""The replicas that one router knows, and the index of what they hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from core.index.membership import Member
from core.index.prefix_index import PrefixIndex
from core.process.supervisor import Supervisor
from core.types.request import Role
from router.serving.replica import Replica
from router.serving.worker import Worker

logger = logging.getLogger(__name__)


class Replicas:
    """Everyone who serves. Lives on the event loop; `router.serving.discovery` keeps it up to date."""

    def __init__(self, connect: Callable[[Member], Worker], *, tasks: Supervisor | None = None) -> None:
        """tasks: among which those are that follow each replica; None: by themselves."""
        self._tasks = tasks or Supervisor()
        self.index = PrefixIndex()
        self.on_change: Callable[[], None] = lambda: None  # called whenever anything is heard of any replica
        self._connect = connect
        self._replicas: dict[str, Replica] = {}
        self._changed = asyncio.Event()
        self._next_stream = 1

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def usable(self, role: Role) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.member.role is role and replica.is_usable]

    def num_usable(self, role: Role) -> int:
        return len(self.usable(role))

    def get(self, replica: str) -> Replica | None:
        return self._replicas.get(replica)

    def new_streams(self, count: int) -> int:
        """The first of `count` stream keys that nobody else of this router has, on any replica."""
        first = self._next_stream
        self._next_stream += count
        return first

    async def changed(self, *, timeout_s: float) -> None:
        """Wait until something is heard of any replica. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._changed.wait()

    def add(self, member: Member) -> None:
        self._replicas[member.replica] = Replica(member, self._connect(member), on_change=self._wake, tasks=self._tasks)
        logger.info("replica found replica=%s address=%s", member.replica, member.address)

    def remove(self, replica: str) -> None:
        self._replicas.pop(replica).forget()
        logger.info("replica gone replica=%s", replica)

    async def close(self) -> None:
        """Whoever waits for one, or for what it says, hears that there is none."""
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        self._wake()  # also where there was none

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()
