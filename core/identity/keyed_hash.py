"""Hashes of words that only a holder of a key can tell: names that nobody else can guess, or read the words out of."""

from __future__ import annotations

import struct
from hashlib import blake2b

_BYTES = 16


def keyed_hash(key: bytes, *words: str, person: bytes) -> str:
    """In hex. person: what it is of, so that hashes of two kinds are never one. Each word comes with its length: no two
    lists of words have one hash."""
    digest = blake2b(key=key, digest_size=_BYTES, person=person)
    for word in words:
        encoded = word.encode()
        digest.update(struct.pack("<I", len(encoded)) + encoded)
    return digest.hexdigest()
