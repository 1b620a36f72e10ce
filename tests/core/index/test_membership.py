"""Leases: members stay while they renew, with their blocks; routers list each other's addresses."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from core.identity.deployment_secrets import sign
from core.index import membership, presence, router_addresses
from core.index.membership import Member, Membership, OtherVersion, RejectionReason
from core.index.presence import Presence
from core.index.redis_client import connect_redis
from core.index.router_addresses import RouterAddresses
from core.types.request import Role
from core.types.tier import Tier
from core.types.wire_version import WIRE_VERSION
from tests.support.members import make_member
from tests.support.redis_at import redis_at
from tests.support.waiting import WITHIN_S, becomes, told

_KEY = bytes(32)
_MEMBER = make_member()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as client:
        await client.flushall()
        yield client


async def test_members_are_listed_until_they_leave(redis: Redis) -> None:
    membership = Membership(redis, name="c", key=_KEY)
    other = replace(_MEMBER, replica="prefill-0", role=Role.PREFILL)
    await membership.renew(_MEMBER)
    assert not await membership.renew(other), "a new lease"
    assert await membership.renew(other), "a renewed lease"
    assert await membership.members() == [_MEMBER, other]
    await membership.leave("decode-0")
    assert await membership.members() == [other]


async def test_expired_lease_is_forgotten(redis: Redis) -> None:
    membership = Membership(redis, name="c", key=_KEY)
    await membership.renew(_MEMBER)
    assert 0 < await redis.pttl("c:member:decode-0") <= 3000
    await redis.delete("c:member:decode-0")  # as at the end of a lease
    assert await membership.members() == []
    assert not await redis.exists("c:members")


async def test_deployments_do_not_see_each_other(redis: Redis) -> None:
    await Membership(redis, name="c", key=_KEY).renew(_MEMBER)
    assert await Membership(redis, name="d", key=_KEY).members() == []


@pytest.mark.parametrize(
    "record",
    [
        _MEMBER.to_json(),
        bytes(32) + _MEMBER.to_json().encode(),
        "",
        " ",
        "not JSON",
        b"\xff\xfe \xff",
        "[" * 10_000,
    ],
)
async def test_unsigned_record_is_ignored_and_logged_once(
    redis: Redis, caplog: pytest.LogCaptureFixture, record: str | bytes
) -> None:
    rejected: list[RejectionReason] = []
    membership = Membership(redis, name="c", key=_KEY, count_rejected=rejected.append)
    good = replace(_MEMBER, replica="prefill-0", role=Role.PREFILL)
    await membership.renew(good)
    await redis.sadd("c:members", "decode-0")
    await redis.set("c:member:decode-0", record)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await membership.members() == [good]
    assert rejected == [RejectionReason.UNSIGNED]
    assert len([line for line in caplog.messages if "decode-0" in line]) == 1


async def test_record_signed_for_another_name_or_deployment_is_ignored(redis: Redis) -> None:
    await Membership(redis, name="c", key=_KEY).renew(_MEMBER)
    signed = await redis.get("c:member:decode-0")
    await redis.sadd("c:members", "decode-7")
    await redis.set("c:member:decode-7", signed)
    assert await Membership(redis, name="c", key=_KEY).members() == [_MEMBER]
    assert await Membership(redis, name="c", key=bytes(31) + b"1").members() == []


def test_missing_fields_have_defaults() -> None:
    fields = asdict(_MEMBER)
    del fields["max_running"]
    assert Member.from_json(json.dumps(fields)) == _MEMBER


@pytest.mark.parametrize("version", [WIRE_VERSION + 1, WIRE_VERSION - 1])
async def test_member_of_another_wire_version_is_ignored_counted_and_logged_once(
    redis: Redis, caplog: pytest.LogCaptureFixture, version: int
) -> None:
    """The record is signed, but only its version is read: other fields may have other meanings."""
    rejected: list[RejectionReason] = []
    membership = Membership(redis, name="c", key=_KEY, count_rejected=rejected.append)
    await membership.renew(_MEMBER)
    text = json.dumps({"wire_version": version, "replica": ["decode", 9]}).encode()
    await redis.sadd("c:members", "decode-9")
    await redis.set("c:member:decode-9", sign(_KEY, text) + text)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await membership.members() == [_MEMBER]
    assert rejected == [RejectionReason.OTHER_VERSION]
    [message] = caplog.messages
    assert "decode-9" in message and f"wire version is {version}, this router's is {WIRE_VERSION}" in message


def test_record_without_a_version_is_an_old_one() -> None:
    fields = asdict(_MEMBER)
    assert fields.pop("wire_version") == WIRE_VERSION
    with pytest.raises(OtherVersion):
        Member.from_json(json.dumps(fields))


@pytest.mark.parametrize("text", ["{}", "[]", "7", '{"role": "decode"}', '{"role": "king"}', "{"])
def test_invalid_record_has_a_reason(text: str) -> None:
    with pytest.raises(ValueError):
        Member.from_json(text)


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LEASE_S", 0.3)
    monkeypatch.setattr(presence, "RENEW_S", 0.1)


@pytest.mark.usefixtures("short_lease")
async def test_leave_is_final_even_if_a_cancellation_is_swallowed(redis_url: str) -> None:
    started = asyncio.Event()

    async def snapshot() -> Mapping[bytes, Tier]:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # redis-py may do this
            pass
        return {}

    redis = connect_redis(redis_url)
    await redis.flushall()
    present = Presence(redis, name="c", key=_KEY, member=make_member(), snapshot=snapshot)
    task = asyncio.create_task(present.run())
    await started.wait()
    task.cancel()
    await present.leave()
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(task, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are still running"
    assert await Membership(redis, name="c", key=_KEY).members() == []
    await redis.aclose()


@pytest.mark.usefixtures("short_lease")
@pytest.mark.parametrize("loss", ["everything", "blocks", "a refused change", "an event"])
async def test_lease_and_blocks_that_redis_lost_are_written_again(loss: str, tmp_path: Path) -> None:
    held, new = {bytes(16): Tier.DEVICE}, bytes([1]) * 16
    member = make_member()
    lease, blocks = f"c:member:{member.replica}", f"c:blocks:{member.replica}:device"

    async def snapshot() -> Mapping[bytes, Tier]:
        return dict(held)

    async def is_complete() -> bool:
        has_stream = await redis.type("c:events") == b"stream"
        has_lease = bool(await redis.exists(lease))
        return has_stream and has_lease and await redis.smembers(blocks) == set(held)  # type: ignore[misc]

    async def is_refused() -> bool:
        return not await redis.exists(lease)

    with redis_at("127.0.0.1", tmp_path) as url:
        redis = connect_redis(url)
        present = Presence(connect_redis(url), name="c", key=_KEY, member=member, snapshot=snapshot)
        task = asyncio.create_task(present.run())
        await told(is_complete)
        match loss:
            case "everything":
                await redis.flushall()
            case "blocks":
                await redis.unlink(blocks)
            case "a refused change":
                await redis.config_set("maxmemory", "1")
                held[new] = Tier.DEVICE
                present.publish({new: Tier.DEVICE})
                await told(is_refused)
                await redis.config_set("maxmemory", "0")
            case "an event":  # routers would never learn of this change
                await redis.delete("c:events")
                await redis.set("c:events", "foreign")
                held[new] = Tier.DEVICE
                present.publish({new: Tier.DEVICE})
        await told(is_complete)
        await present.leave()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await redis.aclose()


@asynccontextmanager
async def _router(redis_url: str, router: str, address: str, *, key: bytes = _KEY) -> AsyncIterator[dict[str, str]]:
    known: dict[str, str] = {}
    addresses = RouterAddresses(connect_redis(redis_url), known, name="d", key=key, router=router, address=address)
    running = asyncio.create_task(addresses.run())
    try:
        yield known
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await addresses.close()


async def test_routers_see_each_other_until_one_leaves(redis_url: str) -> None:
    BlockingRedis.from_url(redis_url).flushall()
    async with _router(redis_url, "router-a", "127.0.0.1:1") as first:
        assert first == {"router-a": "127.0.0.1:1"}, "its own address, before the first read"
        async with _router(redis_url, "router-b", "127.0.0.1:2") as second:
            both = {"router-a": "127.0.0.1:1", "router-b": "127.0.0.1:2"}
            await becomes(lambda: second == both)
        await becomes(lambda: BlockingRedis.from_url(redis_url).smembers("d:routers") == {b"router-a"})


async def test_known_addresses_stay_through_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(router_addresses, "_RENEW_S", 0.05)
    both = {"router-a": "127.0.0.1:1", "router-b": "127.0.0.1:2"}
    async with AsyncExitStack() as stack:
        with redis_at("127.0.0.1", tmp_path) as url:
            first = await stack.enter_async_context(_router(url, "router-a", "127.0.0.1:1"))
            await stack.enter_async_context(_router(url, "router-b", "127.0.0.1:2"))
            await becomes(lambda: first == both)
        await becomes(lambda: "the addresses of other routers stay as they are" in caplog.text)
        assert first == both


async def test_unsigned_router_record_is_ignored(redis_url: str) -> None:
    client = BlockingRedis.from_url(redis_url)
    client.flushall()
    for name, record in {
        "clear": json.dumps({"router": "clear", "address": "evil:1"}).encode(),
        "long": b"x" * 5000,
        "empty": b"",
    }.items():
        client.set(f"d:router:{name}", record)
        client.sadd("d:routers", name)
    async with (
        _router(redis_url, "stranger", "evil:2", key=b"x" * 32),
        _router(redis_url, "router-a", "127.0.0.1:1"),
    ):
        await becomes(lambda: client.smembers("d:routers") >= {b"stranger", b"router-a"})
        client.set("d:router:copied", client.get("d:router:router-a") or b"")  # a signed record under another name
        client.sadd("d:routers", "copied")
        async with _router(redis_url, "router-c", "127.0.0.1:3") as known:
            await becomes(lambda: len(known) > 1)
            assert known == {"router-a": "127.0.0.1:1", "router-c": "127.0.0.1:3"}
