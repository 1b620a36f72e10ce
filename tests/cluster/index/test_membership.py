"""Leases: who renews stays, who leaves or falls silent goes."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from cluster.index.membership import Member, Membership
from cluster.words.request import Role

_MEMBER = Member(
    replica="decode-0",
    role=Role.DECODE,
    address="127.0.0.1:1",
    layout="abc",
    num_blocks=10,
    block_size=16,
    bytes_per_token=64,
    max_tokens=100,
)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as client:
        await client.flushall()
        yield client


async def test_who_renews_is_listed_whole_and_who_leaves_is_not(redis: Redis) -> None:
    membership = Membership(redis, name="c")
    other = replace(_MEMBER, replica="prefill-0", role=Role.PREFILL)
    await membership.renew(_MEMBER)
    assert not await membership.renew(other), "it was not there"
    assert await membership.renew(other), "now it was"
    assert await membership.members() == [_MEMBER, other]
    await membership.leave("decode-0")
    assert await membership.members() == [other]


async def test_a_lease_that_has_ended_is_forgotten(redis: Redis) -> None:
    membership = Membership(redis, name="c")
    await membership.renew(_MEMBER)
    assert 0 < await redis.pttl("c:member:decode-0") <= 3000
    await redis.delete("c:member:decode-0")  # what the server does when the lease ends
    assert await membership.members() == []
    assert not await redis.exists("c:members")


async def test_deployments_do_not_see_each_other(redis: Redis) -> None:
    await Membership(redis, name="c").renew(_MEMBER)
    assert await Membership(redis, name="d").members() == []
