"""A keyed hash depends on the key, the words, their order and the kind."""

from __future__ import annotations

from hashlib import blake2b

from core.identity.keyed_hash import keyed_hash

_KEY = bytes(range(32))


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
