"""Signatures of records, and keyed hashes."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from core.identity.signing import SIGNATURE_BYTES, is_signed, keyed_hash, sign, signed, verified

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
