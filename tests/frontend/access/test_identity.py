"""Identity of a client: salts, limits from the key, and fields that the client sets itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.types.api_key import new_key
from core.types.errors import RequestError
from core.types.request import OFFLINE
from frontend.access.identity import Client, salt_of
from frontend.text.completion_request import CompletionRequest
from tests.frontend.access.keys import SALT_KEY

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
