"""Stored API keys, and validation of an operator's input."""

from __future__ import annotations

import re

import pytest

from core.types.api_key import KeyRegistry, digest_of, new_key, new_secret, parse_priorities
from core.types.errors import SpecError


def test_secret_has_256_bits_and_is_not_stored() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100 and all(re.fullmatch(r"sk-[\w-]{43}", secret) for secret in secrets)
    secret = secrets.pop()
    key = new_key("acme", secret)
    text = KeyRegistry(keys=(key,)).to_json()
    assert secret not in text and secret.removeprefix("sk-") not in text and key.digest == digest_of(secret)
    assert key.id not in secret


def test_registry_round_trips() -> None:
    keys = (new_key("a", "x", rpm=5, priorities=(-1, 3)), new_key("b", "y", tenant="team", tpm=7, concurrency=1))
    book = KeyRegistry(version=4, keys=keys)
    assert KeyRegistry.from_json(book.to_json()) == book


def test_names_are_unique_until_revoked() -> None:
    key = new_key("a", "x")
    book = KeyRegistry().with_key(key)
    assert book.with_key(key) == book == KeyRegistry(version=1, keys=(key,)), "a retry after a crash is idempotent"
    with pytest.raises(SpecError, match="a key is called a already"):
        book.with_key(new_key("a", "y"))
    for name in ("a", key.id):
        assert book.find(name) == key
    with pytest.raises(SpecError, match="no key is called b; there are: a"):
        book.find("b")
    without = book.without(key)
    assert without.without(key) == without == KeyRegistry(version=2), "a repeated revocation is idempotent"


def test_default_tenant_is_the_keys_name() -> None:
    assert new_key("a", "x").tenant == "a" and new_key("a", "x", tenant="team").tenant == "team"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": "a b"}, "NAME 'a b': write 1 to 64 letters"),
        ({"name": "a", "tenant": "x\0y"}, "--tenant"),
        ({"name": "a", "rpm": 0}, "--rpm 0: must be from 1"),
        ({"name": "a", "max_tokens": -1}, "--max-tokens -1"),
    ],
)
def test_invalid_value_is_one_line(arguments: dict[str, object], expected: str) -> None:
    with pytest.raises(SpecError, match=re.escape(expected)):
        new_key(secret="x", **arguments)


def test_priorities() -> None:
    assert parse_priorities("3") == (3, 3) and parse_priorities("-2:5") == (-2, 5)
    for wrong in ("", "a", "5:2", "1:x", str(2**40)):
        with pytest.raises(SpecError, match="--priority"):
            parse_priorities(wrong)
