"""What follows from who asks: salts that never meet, bounds that hold, and names that are a client's own."""

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
def test_no_two_pairs_of_tenant_and_salt_are_one(one: tuple[str, str], other: tuple[str, str]) -> None:
    salts = [salt_of(SALT_KEY, tenant=tenant, cache_salt=salt) for tenant, salt in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)


def test_what_the_audit_did_makes_other_salts() -> None:
    """Once a door joined them by a zero byte: a tenant's salt could be said by anybody."""
    assert ANYBODY.bound(request(cache_salt="acme\0")).salt != client().bound(request()).salt
    assert salt_of(SALT_KEY, tenant="a\0b", cache_salt="c") != salt_of(SALT_KEY, tenant="a", cache_salt="b\0c")


def test_a_salt_says_nothing_to_who_has_not_the_deployments_key() -> None:
    salts = {salt_of(key, tenant="acme", cache_salt="s") for key in (SALT_KEY, bytes(32))}
    assert len(salts) == 2 and not any("acme" in salt for salt in salts)


def test_who_has_neither_key_nor_salt_shares_prefixes() -> None:
    assert ANYBODY.bound(request()).salt == ""


def test_a_tenant_is_what_the_key_says_and_a_user_what_the_client_says() -> None:
    asking = client(tenant="team")
    bound = asking.bound(request(user="victim"))
    assert asking.key and (bound.tenant, bound.user, bound.key_id) == ("team", "victim", asking.key.id)
    assert bound.salt == client(tenant="team").bound(request(user="other")).salt
    assert bound.salt != ANYBODY.bound(request(user="team", cache_salt="")).salt


@pytest.mark.parametrize(("asked", "given"), [(0, 2), (-5, 2), (3, 3), (9, 4)])
def test_a_priority_is_the_nearest_that_the_key_may_ask_for(asked: int, given: int) -> None:
    assert client(priorities=(2, 4)).bound(request(priority=asked)).priority == given
    assert client().bound(request(priority=asked)).priority == asked


def test_an_answer_is_no_longer_than_the_key_may_ask_for() -> None:
    limited = client(max_tokens=10)
    with pytest.raises(RequestError, match="max_tokens: is 11; this API key allows at most 10") as caught:
        limited.bound(request(max_tokens=11))
    assert caught.value.param == "max_tokens"
    assert limited.bound(request(max_tokens=10)).max_tokens == 10
    assert limited.bound(request()).max_answer == 10


@pytest.mark.parametrize(("field", "length"), [("cache_salt", 1025), ("user", 257)])
def test_a_word_of_the_client_has_bounds(field: str, length: int) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        ANYBODY.bound(request(**{field: "x" * length}))
    assert caught.value.param == field


def test_strangers_do_not_hear_what_was_cached_unless_they_share_a_word() -> None:
    pending_peer = Client(key=None, salt_key=SALT_KEY, reports_cached_tokens=False)
    assert not pending_peer.bound(request()).reports_cached_tokens
    assert pending_peer.bound(request(cache_salt="ours")).reports_cached_tokens
    assert client().bound(request()).reports_cached_tokens


def test_every_key_may_send_offline_requests() -> None:
    for asked in (client(priorities=(-5, 5)), client(), ANYBODY):
        assert asked.bound(request(priority=OFFLINE)).priority == OFFLINE
    assert client(priorities=(-5, 5)).bound(request(priority=OFFLINE - 1)).priority == 5
