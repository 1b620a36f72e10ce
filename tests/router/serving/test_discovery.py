"""Replicas that a router finds in Redis and at the controller, and forgets when both have."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest

from core.index.membership import Membership, signed_record
from core.index.redis_client import connect_redis
from core.index.store import IndexWriter
from core.rpc import worker_pb2 as pb
from core.types.tier import Tier
from router.serving import discovery
from router.serving.discovery import Discovery
from router.serving.replicas import Replicas
from tests.support.members import make_member
from tests.support.waiting import becomes

_NAME, _KEY, _HASH = "here", bytes(32), bytes(16)


class _Worker:
    """Worker whose frames end on request; the next connections stay silent."""

    def __init__(self, member: object) -> None:
        self._has_ended = asyncio.Event()
        self.num_connected = 0

    async def follow(self, take: Callable[[pb.Frame], None]) -> None:
        self.num_connected += 1
        if self._has_ended.is_set():
            await asyncio.Event().wait()
        take(pb.Frame(number=0, status=pb.Status(replica="decode-0")))
        await self._has_ended.wait()

    def end(self) -> None:
        self._has_ended.set()

    async def close(self) -> None:
        pass


class _Router:
    def __init__(self, redis_url: str, *, listed: list[bytes] | None) -> None:
        """listed: the controller's records; None: there is no controller."""
        self.workers: list[_Worker] = []
        self.replicas = Replicas(self._connect)
        self.redis = connect_redis(redis_url)
        self.membership = Membership(self.redis, name=_NAME, key=_KEY)

        async def find_members() -> list[bytes]:
            assert listed is not None
            return [*listed]

        self.discovery = Discovery(
            connect_redis(redis_url),
            self.replicas,
            name=_NAME,
            key=_KEY,
            find_members=None if listed is None else find_members,
        )

    def _connect(self, member: object) -> Any:
        self.workers.append(_Worker(member))
        return self.workers[-1]

    async def has(self, *names: str) -> None:
        """Wait until exactly these replicas are known, and alive."""
        await becomes(lambda: [replica.id for replica in self.replicas if replica.is_alive] == [*names])
        assert {replica.id for replica in self.replicas} == {*names}

    async def next_refresh(self) -> None:
        """Wait until the membership of now has been read."""
        await self.membership.renew(make_member("prefill-9"))
        await becomes(lambda: self.replicas.get("prefill-9") is not None)


@asynccontextmanager
async def _opened(redis_url: str, *, listed: list[bytes] | None = None) -> AsyncIterator[_Router]:
    router = _Router(redis_url, listed=listed)
    await router.redis.flushall()
    try:
        yield router
    finally:
        await router.discovery.close()
        await router.replicas.close()
        await router.redis.aclose()


async def test_record_of_a_member_is_taken_whole(redis_url: str) -> None:
    member = replace(make_member(), layout="other", max_tokens=77)
    async with _opened(redis_url) as router:
        await router.membership.renew(member)
        router.discovery.start()
        await router.has("decode-0")
        assert [replica.member for replica in router.replicas] == [member]


async def test_lease_and_frames_must_both_end(redis_url: str) -> None:
    """A replica that still sends frames is used without a lease, which Redis may have lost."""
    async with _opened(redis_url) as router:
        await router.membership.renew(make_member())
        await IndexWriter(router.redis, name=_NAME, replica="decode-0").reset({_HASH: Tier.DEVICE})
        router.discovery.start()
        await router.has("decode-0")
        await becomes(lambda: router.replicas.index.match([_HASH]) == {"decode-0": 1})
        await router.membership.leave("decode-0")
        await router.next_refresh()
        await router.has("decode-0", "prefill-9")
        old = ref(router.replicas.get("decode-0") or router)

        def is_freed() -> bool:
            gc.collect()
            return old() is None

        router.workers[0].end()
        await becomes(lambda: router.replicas.get("decode-0") is None)
        await becomes(lambda: not router.replicas.index.match([_HASH]))
        await becomes(is_freed)  # its frames are no longer followed

        # Its name may return, as another process.
        await router.membership.renew(make_member())
        await becomes(lambda: router.replicas.get("decode-0") is not None)
        assert len(router.workers) == 3
        await becomes(lambda: router.workers[2].num_connected == 1)


async def test_dead_replica_stays_known_while_it_has_a_lease(redis_url: str) -> None:
    async with _opened(redis_url) as router:
        await router.membership.renew(make_member())
        router.discovery.start()
        await router.has("decode-0")
        router.workers[0].end()
        await becomes(lambda: router.workers[0].num_connected == 2)
        await router.next_refresh()
        assert router.replicas.get("decode-0") is not None


@pytest.mark.parametrize("is_in_redis", [False, True])
async def test_controllers_latest_list_counts(
    redis_url: str, is_in_redis: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_CONTROLLER_S", 0.2)
    listed = [signed_record(make_member(), _KEY), b"forged"]
    async with _opened(redis_url, listed=listed) as router:
        if is_in_redis:
            await router.membership.renew(make_member())
        router.discovery.start()
        await router.has("decode-0")
        assert len(router.workers) == 1
        await router.membership.leave("decode-0")
        router.workers[0].end()
        await becomes(lambda: router.workers[0].num_connected == 2)
        await router.next_refresh()
        assert router.replicas.get("decode-0") is not None, "the controller still lists it"
        listed.clear()
        await becomes(lambda: router.replicas.get("decode-0") is None)
