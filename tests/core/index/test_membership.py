"""Leases: members stay while they renew."""

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict, replace

import pytest
from redis.asyncio import Redis

from core.identity.signing import sign
from core.index.membership import Member, Membership, OtherVersion, RejectionReason
from core.types.request import Role
from core.types.wire_version import WIRE_VERSION
from tests.support.members import make_member

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


def test_unknown_fields_are_ignored_and_missing_ones_have_defaults() -> None:
    fields = asdict(_MEMBER)
    assert Member.from_json(json.dumps({**fields, "speed": 9})) == _MEMBER
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
