"""Discovery of replicas through Redis and the controller; of their cached blocks and of revisions through Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from core.index.membership import Member, Membership, RejectionReason
from core.index.redis_client import RedisReach
from core.index.revision_channel import RevisionChannel
from core.index.store import IndexReader
from core.process.supervisor import Supervisor
from core.types.errors import ClusterError
from core.types.revisions import RevisionTable
from router.routing.revisions import Revisions
from router.serving.replicas import NO_DECODE_REPLICA, Replicas

_REFRESH_S = 0.25
_FOLLOW_MS = 500
_CONTROLLER_S = 2.0  # how often the controller's list is read

FindMembers = Callable[[], Awaitable[Iterable[bytes]]]  # raises ClusterError

logger = logging.getLogger(__name__)


class Discovery:
    """Follower of the membership and the block index. Owns `redis`.

    The router uses each replica that either source lists. While both are unavailable the known replicas stay, because
    their token frames show whether they are alive.
    """

    def __init__(
        self,
        redis: Redis,
        replicas: Replicas,
        *,
        name: str,
        key: bytes,
        find_members: FindMembers | None = None,
        tasks: Supervisor | None = None,
        count_rejected: Callable[[RejectionReason], object] = lambda why: None,
    ) -> None:
        """name: of the deployment. key: signing key of its members. find_members: returns the controller's signed
        records, used in addition to those in Redis; None: no controller. tasks: supervisor of the background tasks;
        None: a new one. count_rejected: called for each record with a bad signature or format."""
        self._redis = redis
        self._replicas = replicas
        self._membership = Membership(redis, name=name, key=key, count_rejected=count_rejected)
        self._reader = IndexReader(redis, replicas.index, name=name)
        self._find_members = find_members
        self._in_redis: dict[str, Member] = {}
        self._at_controller: dict[str, Member] = {}
        self._unread: set[str] = set()  # replicas whose blocks are still to be read
        self._gone: set[str] = set()  # replicas whose blocks are still to be deleted
        self._has_failed = False  # the controller did not answer last time
        self.has_read = False  # membership has been read at least once
        replicas.availability.missing = "the router has no list of replicas yet"
        self._reach = RedisReach("routing continues with the known replicas")
        self._is_closing = False
        self._refresh_s = _REFRESH_S
        self._supervisor = tasks or Supervisor()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *, refresh_s: float = _REFRESH_S) -> None:
        """refresh_s: interval between reads of the membership."""
        self._refresh_s = refresh_s
        self._tasks = [
            self._supervisor.start("membership", lambda: self._forever(self._refresh)),
            self._supervisor.start("index", lambda: self._forever(self._follow_index)),
        ]
        if self._find_members:
            find = self._find_members
            self._tasks.append(self._supervisor.start("controller-members", lambda: self._ask_forever(find)))

    @property
    def problem(self) -> str:
        """Reason why Redis does not serve this router; empty if it does."""
        return self._reach.problem

    async def close(self) -> None:
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()

    async def _refresh(self) -> None:
        self._in_redis = {member.replica: member for member in await self._membership.members()}
        self._take_members()
        # Replicas serve before their blocks are read, which takes several round trips of a slow Redis.
        for replica in list(self._unread):
            await self._reader.load([replica])
            self._unread.discard(replica)
        for replica in list(self._gone):
            await self._reader.forget(replica)
            self._gone.discard(replica)
        await asyncio.sleep(self._refresh_s)

    def _take_members(self) -> None:
        """Add the members that either source lists, and remove dead replicas that neither lists."""
        members = self._at_controller | self._in_redis
        for replica, member in members.items():
            if not self._replicas.get(replica):
                self._replicas.add(member)
                self._unread.add(replica)
        for replica in [r.id for r in self._replicas if r.id not in members and not r.is_alive]:
            self._replicas.remove(replica)
            self._unread.discard(replica)
            self._gone.add(replica)
        self.has_read = True
        self._replicas.availability.missing = NO_DECODE_REPLICA

    async def _ask_forever(self, find_members: FindMembers) -> None:
        while not self._is_closing:
            try:
                records = await find_members()
            except ClusterError as error:
                if not self._has_failed:
                    logger.warning("cannot read the replicas from the controller error=%s", error)
                self._has_failed = True
            else:
                self._has_failed = False
                self._at_controller = {member.replica: member for member in self._membership.opened(records)}
                self._take_members()
            await asyncio.sleep(_CONTROLLER_S)

    async def _follow_index(self) -> None:
        await self._reader.follow([replica.id for replica in self._replicas], wait_ms=_FOLLOW_MS)

    async def _forever(self, action: Callable[[], Awaitable[None]]) -> None:
        while not self._is_closing:  # redis-py may swallow a cancellation
            try:
                await action()
                self._reach.found(action.__name__)
            except RedisError as error:
                self._reach.missed(error, action.__name__)
                await asyncio.sleep(self._refresh_s)


class RevisionWatch:
    """Follower of the revision table. Owns `redis`. While Redis is unavailable the known revisions stay."""

    def __init__(
        self,
        redis: Redis,
        revisions: Revisions,
        *,
        name: str,
        key: bytes,
        router: str,
        known: RevisionTable | None = None,
    ) -> None:
        """name: deployment. key: key with which its processes sign revision messages. router: name of this router.
        known: table received from the controller directly; older tables in Redis are ignored."""
        self._redis = redis
        self._revisions = revisions
        self._channel = RevisionChannel(redis, name=name, key=key, least_version=known.version if known else 0)
        if known:
            revisions.take(known)
        self._router = router
        self._reach = RedisReach("requests go to the known revisions")

    async def follow_forever(self) -> None:
        """Follow the revision table and report counts until cancelled."""
        me = asyncio.current_task()
        while not (me and me.cancelling()):  # redis-py may swallow a cancellation
            try:
                await self._look()
                self._reach.found()
            except RedisError as error:
                self._reach.missed(error)
            except (ValueError, KeyError, TypeError) as error:
                logger.error("malformed revision table in Redis: %s", error)
            await asyncio.sleep(_REFRESH_S)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _look(self) -> None:
        if table := await self._channel.read():
            self._take(table)
        if self._revisions.is_split:
            await self._channel.tell(self._router, self._revisions.counts)

    def _take(self, table: RevisionTable) -> None:
        before = {one.number for one in self._revisions.all}
        self._revisions.take(table)
        if before != {one.number for one in table.revisions}:
            logger.info("revisions: %s", ", ".join(str(one.number) for one in table.revisions) or "one")
