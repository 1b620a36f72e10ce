"""Registry of one router's replicas, with the index of their blocks and the availability of the model."""

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

NO_DECODE_REPLICA = "it has no decode replica"


class Replicas:
    """Registry of all replicas. Lives on the event loop; `router.serving.discovery` keeps it up to date."""

    def __init__(
        self, connect: Callable[[Member], Worker], *, tasks: Supervisor | None = None, model: str = ""
    ) -> None:
        """tasks: supervisor of the tasks that follow the replicas; None: a new one. model: name used by clients."""
        self.availability = Availability(self.may_answer, model=model)
        self._tasks = tasks or Supervisor()
        self.index = PrefixIndex()
        self.on_change: Callable[[], None] = lambda: None  # called after each report of any replica
        self._connect = connect
        self._replicas: dict[str, Replica] = {}
        # By id, of those that report checkpoints: how many a prefix needs; see CacheShape.
        self.num_checkpoints: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._next_stream = 1
        self._max_tokens: int | None = None

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def usable(self, role: Role) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.member.role is role and replica.is_usable]

    def answerers(self) -> Iterator[Replica]:
        """Yield the replicas that can decode: decode replicas, and prefill replicas that allow local decodes."""
        yield from self.usable(Role.DECODE)
        yield from (replica for replica in self.usable(Role.PREFILL) if replica.member.max_local_decodes)

    def may_answer(self) -> bool:
        return any(True for _ in self.answerers())

    def num_usable(self, role: Role) -> int:
        return len(self.usable(role))

    def max_tokens(self) -> int | None:
        """Return the length of the longest sequence that a decode replica can hold; None until one is known."""
        self._max_tokens = max((one.member.max_tokens for one in self.usable(Role.DECODE)), default=self._max_tokens)
        return self._max_tokens

    def get(self, replica: str) -> Replica | None:
        return self._replicas.get(replica)

    def new_streams(self, count: int) -> int:
        """Allocate `count` consecutive stream keys, unique within this router, and return the first."""
        first = self._next_stream
        self._next_stream += count
        return first

    async def changed(self, *, timeout_s: float) -> None:
        """Wait for a report of any replica. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._changed.wait()

    def add(self, member: Member) -> None:
        if other := next((one.id for one in self if one.member.layout != member.layout), None):
            logger.warning(
                "replicas exchange no KV: unlike weights, kv settings or kv_basis.safetensors replica=%s other=%s",
                member.replica,
                other,
            )
        self._replicas[member.replica] = Replica(member, self._connect(member), on_change=self._wake, tasks=self._tasks)
        if num_checkpoints := member.cache.num_checkpoints:
            self.num_checkpoints[member.replica] = num_checkpoints
        logger.info("replica found replica=%s address=%s", member.replica, member.address)

    def remove(self, replica: str) -> None:
        self._replicas.pop(replica).forget()
        self.num_checkpoints.pop(replica, None)
        logger.info("replica gone replica=%s", replica)

    async def close(self) -> None:
        """Disconnect from all replicas; requests that wait for one get an error."""
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        self._wake()  # needed if there were no replicas

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()


class Availability:
    """Tracker of a model's availability: the time for which checks have found no replica that can answer."""

    def __init__(self, may_answer: Callable[[], bool], *, model: str) -> None:
        """may_answer: returns whether a replica can answer now. model: name used by clients."""
        self._may_answer = may_answer
        self._model = model
        self._now = asyncio.get_running_loop().time
        self._since: float | None = None
        self._has_ended = False
        self.missing = NO_DECODE_REPLICA  # for the error while no replica can answer

    def look(self) -> float | None:
        """Check for a replica that can answer. Return None if there is one, else the seconds since none was found."""
        if self._may_answer():
            self._since = None
            return None
        now = self._now()
        self._since = now if self._since is None else self._since
        return now - self._since

    def check(self, *, within_s: float = math.inf) -> None:
        """Raise ModelUnavailable if no replica could answer for longer than within_s, or after `end`."""
        if self._has_ended or (within_s < math.inf and (self.look() or 0.0) > within_s):
            raise self.error()

    def end(self) -> None:
        """Mark the model as no longer served by this router, so that no request waits for a replica."""
        self._has_ended = True

    def error(self, *, num_tokens: int = 0) -> ModelUnavailable:
        """num_tokens: length of the sequence that a replica must hold."""
        called = f"model {self._model!r}" if self._model else "this model"
        why = "this router leaves it" if self._has_ended else self.missing
        if why == NO_DECODE_REPLICA and num_tokens:
            why += f" that holds {num_tokens} tokens"
        return ModelUnavailable(f"{called} cannot be served at present: {why}", retry_after_s=1.0)
