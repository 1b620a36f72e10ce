"""Keyed hashes of strings: names that only a holder of the key can compute or link to the strings."""

from __future__ import annotations

import struct
from hashlib import blake2b

_BYTES = 16


def keyed_hash(key: bytes, *words: str, person: bytes) -> str:
    """Return the hash of `words` in hex. Each word is hashed with its length, so different lists never collide.

    person: domain separation; up to 16 bytes.
    """
    digest = blake2b(key=key, digest_size=_BYTES, person=person)
    for word in words:
        encoded = word.encode()
        digest.update(struct.pack("<I", len(encoded)) + encoded)
    return digest.hexdigest()
