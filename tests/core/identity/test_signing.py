"""Signatures of records, keyed hashes, and the secrets of a deployment, which do not leak."""

from __future__ import annotations

import pickle
from hashlib import blake2b

import pytest

from core.identity.deployment_secrets import (
    SIGNATURE_BYTES,
    DeploymentSecrets,
    Purpose,
    is_signed,
    keyed_hash,
    sign,
    signed,
    verified,
)
from core.spec.loader import parse_spec
from core.types.launch import Launch

_KEY = bytes(range(32))


def test_signature_is_standard_hmac() -> None:
    """RFC 4231, test case 2."""
    made = sign(b"Jefe", b"what do ya want ", memoryview(b"for nothing?"))
    assert made.hex() == "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
    assert len(made) == SIGNATURE_BYTES


@pytest.mark.parametrize(
    ("key", "parts"),
    [(bytes(32), (b"header", b"data")), (_KEY, (b"payload", b"data")), (_KEY, (b"header", b"date")), (_KEY, ())],
    ids=["another key", "as another thing", "other data", "nothing"],
)
def test_signature_covers_key_context_and_value(key: bytes, parts: tuple[bytes, ...]) -> None:
    shown = sign(_KEY, b"header", b"data")
    assert is_signed(shown, _KEY, b"header", b"data")
    assert not is_signed(shown, key, *parts)
    assert not is_signed(shown[:-1], _KEY, b"header", b"data") and not is_signed(b"", _KEY, b"header", b"data")


def test_signed_value_round_trips_only_with_equal_context() -> None:
    found = signed(b"value", _KEY, b"place", b"1")
    assert found == sign(_KEY, b"place", b"1", b"value") + b"value"
    assert verified(found, _KEY, b"place", b"1") == b"value"
    assert verified(found, _KEY, b"place", b"2") is None and verified(found, bytes(32), b"place", b"1") is None
    assert verified(found[:-1], _KEY, b"place", b"1") is None and verified(b"", _KEY, b"place", b"1") is None


def test_different_inputs_have_different_hashes() -> None:
    words = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("c", "ab"), ()]
    hashes = {
        keyed_hash(key, *some, person=person) for some in words for person in (b"a", b"b") for key in (_KEY, b"k")
    }
    assert len(hashes) == 4 * len(words)


def test_hash_is_stable_across_versions() -> None:
    """Redis keys and cached files outlive a process."""
    written = b"\x02\0\0\0ab\x01\0\0\0c"
    made = blake2b(written, key=_KEY, digest_size=16, person=b"kind").hexdigest()
    assert keyed_hash(_KEY, "ab", "c", person=b"kind") == made


_URL = "rediss://:pass-of-the-index@redis.example:6380/0"


def test_repr_of_a_launch_hides_secrets() -> None:
    credentials = DeploymentSecrets.new(index_url=_URL)
    launch = Launch(spec=parse_spec({"index": _URL}), log_dir="logs", credentials=credentials)
    for shown in (repr(launch), str(launch), repr(credentials), str(credentials), str([launch.spec])):
        assert credentials.secret.hex() not in shown and repr(credentials.secret) not in shown
        assert "pass-of-the-index" not in shown


def test_launch_round_trips_through_pickle() -> None:
    """Ray pickles it like any argument."""
    launch = Launch(
        spec=parse_spec({"decode": {"replicas": 3}}), log_dir="logs", credentials=DeploymentSecrets.new(index_url=_URL)
    )
    there = pickle.loads(pickle.dumps(launch))
    assert there == launch and there.credentials.index_url == _URL
    assert there.credentials.key(Purpose.LINKS) == launch.credentials.key(Purpose.LINKS)


def test_missing_keys_get_the_receivers_defaults() -> None:
    """During an upgrade an older controller starts newer processes."""
    launch = Launch(spec=parse_spec({"name": "a"}), log_dir="logs", credentials=DeploymentSecrets.new(index_url=_URL))
    arrive, (spec, *rest) = launch.__reduce__()
    del spec["security"], spec["kv"]["encrypt"]
    assert arrive(spec, *rest) == launch


def test_each_purpose_has_its_own_key() -> None:
    credentials, other = DeploymentSecrets.new(index_url=""), DeploymentSecrets.new(index_url="")
    keys = [each.key(purpose) for each in (credentials, other) for purpose in Purpose]
    assert len(set(keys)) == 2 * len(Purpose) and {len(key) for key in keys} == {32}
    assert credentials.key(Purpose.LINKS) == DeploymentSecrets(secret=credentials.secret, index_url="").key(
        Purpose.LINKS
    )
