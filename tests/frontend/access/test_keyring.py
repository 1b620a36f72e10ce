"""Identity of a client: its key, which follows the controller's registry; its salt, and what the key bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from core.identity.deployment_secrets import DeploymentSecrets, Purpose
from core.index.key_channel import KeyPublisher, KeyReader
from core.index.redis_client import connect_redis
from core.process.ports import free_port
from core.process.supervisor import Supervisor
from core.types.api_key import OPERATOR, new_key
from core.types.errors import KeysUnknown, RequestError, Unauthenticated
from core.types.request import OFFLINE
from frontend.access.access import Access, Client, Keyring, salt_of
from frontend.text.completion_request import CompletionRequest
from tests.frontend.access.keys import SALT_KEY, SEAL_KEY, IssuedKey, book_of, issue
from tests.support.waiting import becomes


@pytest.fixture
def wiped(redis_url: str) -> str:
    redis.Redis.from_url(redis_url).flushall()
    return redis_url


@pytest.fixture
async def publisher(wiped: str) -> AsyncIterator[KeyPublisher]:
    one = KeyPublisher(connect_redis(wiped), name="d", signing_key=SEAL_KEY)
    yield one
    await one.close()


@asynccontextmanager
async def following(client: Redis) -> AsyncIterator[Keyring]:
    ring = Keyring(KeyReader(client, name="d", signing_key=SEAL_KEY), salt_key=SALT_KEY, is_required=True)
    await ring.read()
    task = asyncio.create_task(ring.follow_forever())
    try:
        yield ring
    finally:
        ring.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.aclose()


Followed = tuple[IssuedKey, Keyring]


@pytest.fixture
async def followed(wiped: str, publisher: KeyPublisher) -> AsyncIterator[Followed]:
    """Return a key that the controller has published, and a keyring that follows."""
    known = issue("a")
    await publisher.publish(book_of(known))
    async with following(connect_redis(wiped)) as ring:
        yield known, ring


def lets_in(ring: Keyring, issued: IssuedKey) -> bool:
    try:
        return ring.identify(issued.header).key == issued.key
    except Unauthenticated:
        return False


@pytest.fixture
def ring() -> Keyring:
    return Keyring(None, salt_key=SALT_KEY, is_required=True)


def test_key_without_scheme_is_explained(ring: Keyring) -> None:
    known = issue("acme")
    ring.take(book_of(known))
    with pytest.raises(Unauthenticated, match="no Bearer scheme"):
        ring.identify(known.secret)


def test_only_known_secrets_are_accepted(ring: Keyring) -> None:
    known, other = issue("a"), issue("b")
    ring.take(book_of(known))
    assert lets_in(ring, known) and not lets_in(ring, other)
    for header in (None, "", "Bearer", "Bearer ", known.secret, f"Basic {known.secret}", f"Bearer {known.key.digest}"):
        with pytest.raises(Unauthenticated):
            ring.identify(header)
    assert ring.identify(f"bearer  {known.secret} ").key == known.key  # the scheme is case-insensitive
    with pytest.raises(Unauthenticated):
        ring.identify("Bearer " + "x" * 100_000)


def test_optional_keys_still_identify() -> None:
    ring = Keyring(None, salt_key=SALT_KEY, is_required=False)
    known = issue("a")
    ring.take(book_of(known))
    assert ring.identify(known.header).key == known.key
    for header in (None, "Bearer none", issue("b").header):
        assert ring.identify(header).key is None


@pytest.mark.parametrize(
    ("is_required", "tenants", "expected"),
    [
        (True, [], False),
        (True, ["a"], False),
        (True, ["a", "a"], False),
        (True, ["a", "b"], True),
        (False, [], False),
        (False, ["a"], True),  # and anonymous clients
    ],
)
def test_operator_is_not_a_tenant(is_required: bool, tenants: list[str], expected: bool) -> None:
    ring = Keyring(None, salt_key=SALT_KEY, is_required=is_required)
    issued = [issue(f"{tenant}-{number}", tenant=tenant) for number, tenant in enumerate(tenants)]
    ring.take(book_of(issue(OPERATOR), *issued))
    assert ring.has_many_tenants is expected


def test_keys_not_read_yet_are_reported(ring: Keyring) -> None:
    with pytest.raises(KeysUnknown):
        ring.identify(issue("a").header)


async def test_created_and_revoked_keys_take_effect(followed: Followed, publisher: KeyPublisher) -> None:
    (first, ring), second = followed, issue("b")
    assert lets_in(ring, first), "it was read at the start"
    await publisher.publish(book_of(first, second, version=2))
    await becomes(lambda: lets_in(ring, second))
    await publisher.publish(book_of(second, version=3))
    await becomes(lambda: not lets_in(ring, first))
    assert lets_in(ring, second)


@pytest.mark.parametrize("is_foreign", [False, True], ids=["empty", "of another type"])
async def test_lost_registry_removes_no_keys(
    followed: Followed, wiped: str, publisher: KeyPublisher, is_foreign: bool
) -> None:
    known, ring = followed
    with redis.Redis.from_url(wiped) as client:
        client.flushall()
        if is_foreign:
            client.set("d:keys", "foreign")
    await ring.read()
    assert lets_in(ring, known)
    if not is_foreign:
        await publisher.publish(book_of(known))  # the controller publishes again
        async with following(connect_redis(wiped)) as newcomer:
            assert lets_in(newcomer, known)


async def test_unreachable_redis_removes_no_keys() -> None:
    async with following(connect_redis(f"redis://127.0.0.1:{free_port()}")) as ring:
        known = issue("a")
        ring.take(book_of(known))
        await ring.read()
        assert lets_in(ring, known)


async def test_forged_keys_are_ignored(followed: Followed, wiped: str) -> None:
    (known, ring), forged = followed, issue("b")
    forger = KeyPublisher(connect_redis(wiped), name="d", signing_key=b"another secret")
    await forger.publish(book_of(known, forged, version=9))
    await ring.read()
    assert lets_in(ring, known) and not lets_in(ring, forged)
    redis.Redis.from_url(wiped).hset("d:keys", mapping={"book": b"\xff[", "seal": "x"})
    await ring.read()
    assert lets_in(ring, known)
    await forger.close()


@pytest.mark.parametrize("answer", [5, [b"book"], [5, 5], [b"book", 5]], ids=str)
async def test_malformed_registry_is_ignored(answer: object) -> None:
    class FakeRedis:
        async def hmget(self, *asked: str) -> object:
            return answer

    known = issue("a")
    reader = KeyReader(cast(Redis, FakeRedis()), name="d", signing_key=SEAL_KEY)
    ring = Keyring(reader, salt_key=SALT_KEY, is_required=True)
    ring.take(book_of(known))
    await ring.read()
    assert lets_in(ring, known)


async def test_older_registry_does_not_restore_a_revoked_key(wiped: str, publisher: KeyPublisher) -> None:
    known = issue("a")
    await publisher.publish(book_of(known, version=1))
    client = redis.Redis.from_url(wiped)
    old = client.hgetall("d:keys")
    await publisher.publish(book_of(version=2))
    async with following(connect_redis(wiped)) as ring:
        assert not lets_in(ring, known)
        client.hset("d:keys", mapping=old)
        await ring.read()
        assert not lets_in(ring, known)
    client.close()


async def test_registry_with_a_broken_signature_is_reread(wiped: str, publisher: KeyPublisher) -> None:
    known, forged = issue("a"), issue("b")
    await publisher.publish(book_of(known))
    client = redis.Redis.from_url(wiped)
    client.hset("d:keys", "book", book_of(known, forged, version=9).to_json())
    async with following(connect_redis(wiped)) as newcomer:
        with pytest.raises(KeysUnknown):
            newcomer.identify(forged.header)
        await publisher.publish(book_of(known))
        await becomes(lambda: _has_heard(newcomer))
        assert lets_in(newcomer, known) and not lets_in(newcomer, forged)
    client.close()


def _has_heard(ring: Keyring) -> bool:
    try:
        ring.identify(None)
    except KeysUnknown:
        return False
    except Unauthenticated:
        pass
    return True


async def test_new_router_ignores_registries_older_than_the_controllers(wiped: str) -> None:
    kept, revoked = issue("a"), issue("b")
    credentials = DeploymentSecrets.new(index_url=wiped)
    publisher = KeyPublisher(connect_redis(wiped), name="d", signing_key=credentials.key(Purpose.API_KEYS))
    # An old registry with a valid signature, restored by an attacker.
    await publisher.publish(book_of(kept, revoked, version=2))
    await publisher.close()
    access = await Access.follow(
        credentials,
        name="d",
        is_required=True,
        reports_cached_tokens=False,
        num_routers=1,
        count=lambda outcome: None,
        tasks=Supervisor(),
        known=book_of(kept, version=3),
    )
    assert access.identify(kept.header).key == kept.key
    with pytest.raises(Unauthenticated):
        access.identify(revoked.header)
    await access.close()


_WORDS = st.text(alphabet="ab\0\u00e9", max_size=4)


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest(id="r1", prompt="x", **fields)


def client(**limits: Any) -> Client:
    return Client(key=new_key("acme", "sk-x", **limits), salt_key=SALT_KEY)


ANYBODY = Client(key=None, salt_key=SALT_KEY)


@given(st.tuples(_WORDS, _WORDS), st.tuples(_WORDS, _WORDS))
def test_salts_of_distinct_tenants_and_salts_differ(one: tuple[str, str], other: tuple[str, str]) -> None:
    salts = [salt_of(SALT_KEY, tenant=tenant, cache_salt=salt) for tenant, salt in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)


def test_zero_bytes_do_not_join_tenant_and_salt() -> None:
    """Regression: tenant and salt were once joined by a zero byte, so a client could forge another tenant's salt."""
    assert ANYBODY.bound(request(cache_salt="acme\0")).salt != client().bound(request()).salt
    assert salt_of(SALT_KEY, tenant="a\0b", cache_salt="c") != salt_of(SALT_KEY, tenant="a", cache_salt="b\0c")


def test_salt_depends_on_the_deployment_key() -> None:
    salts = {salt_of(key, tenant="acme", cache_salt="s") for key in (SALT_KEY, bytes(32))}
    assert len(salts) == 2 and not any("acme" in salt for salt in salts)


def test_requests_without_key_and_salt_share_prefixes() -> None:
    assert ANYBODY.bound(request()).salt == ""


def test_tenant_comes_from_the_key_and_user_from_the_client() -> None:
    asking = client(tenant="team")
    bound = asking.bound(request(user="victim"))
    assert asking.key and (bound.tenant, bound.user, bound.key_id) == ("team", "victim", asking.key.id)
    assert bound.salt == client(tenant="team").bound(request(user="other")).salt
    assert bound.salt != ANYBODY.bound(request(user="team", cache_salt="")).salt


@pytest.mark.parametrize(("asked", "given"), [(0, 2), (-5, 2), (3, 3), (9, 4)])
def test_priority_is_clamped_to_the_key(asked: int, given: int) -> None:
    assert client(priorities=(2, 4)).bound(request(priority=asked)).priority == given
    assert client().bound(request(priority=asked)).priority == asked


def test_answer_is_limited_by_the_key() -> None:
    limited = client(max_tokens=10)
    with pytest.raises(RequestError, match="max_tokens: is 11; this API key allows at most 10") as caught:
        limited.bound(request(max_tokens=11))
    assert caught.value.param == "max_tokens"
    assert limited.bound(request(max_tokens=10)).max_tokens == 10
    assert limited.bound(request()).max_answer == 10


@pytest.mark.parametrize(("field", "length"), [("cache_salt", 1025), ("user", 257)])
def test_client_strings_are_limited(field: str, length: int) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        ANYBODY.bound(request(**{field: "x" * length}))
    assert caught.value.param == field


def test_anonymous_clients_see_cached_tokens_only_with_a_salt() -> None:
    pending_peer = Client(key=None, salt_key=SALT_KEY, reports_cached_tokens=False)
    assert not pending_peer.bound(request()).reports_cached_tokens
    assert pending_peer.bound(request(cache_salt="ours")).reports_cached_tokens
    assert client().bound(request()).reports_cached_tokens


def test_every_key_may_send_offline_requests() -> None:
    for asked in (client(priorities=(-5, 5)), client(), ANYBODY):
        assert asked.bound(request(priority=OFFLINE)).priority == OFFLINE
    assert client(priorities=(-5, 5)).bound(request(priority=OFFLINE - 1)).priority == 5
