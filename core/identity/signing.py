"""HMAC-SHA256 signatures, which detect changes by writers without the key, and keyed hashes of strings."""

from __future__ import annotations

import hmac
import struct
from hashlib import blake2b

SIGNATURE_BYTES = 32
_HASH_BYTES = 16

_Bytes = bytes | bytearray | memoryview


def sign(key: bytes, *parts: _Bytes) -> bytes:
    """Return the HMAC-SHA256 of `parts`, SIGNATURE_BYTES long. parts: context words of fixed length, then the data."""
    digest = hmac.new(key, digestmod="sha256")
    for part in parts:
        digest.update(part)
    return digest.digest()


def signed(value: bytes, key: bytes, *words: bytes) -> bytes:
    """Return the signature of `words` and `value`, followed by `value`."""
    return sign(key, *words, value) + value


def verified(found: bytes, key: bytes, *words: bytes) -> bytes | None:
    """Return the value of a signed record; None if its signature is invalid."""
    shown, value = found[:SIGNATURE_BYTES], found[SIGNATURE_BYTES:]
    return value if is_signed(shown, key, *words, value) else None


def is_signed(shown: bytes, key: bytes, *parts: _Bytes) -> bool:
    """Compare `shown` with the signature of `parts`, in constant time."""
    return hmac.compare_digest(shown, sign(key, *parts))


def keyed_hash(key: bytes, *words: str, person: bytes) -> str:
    """Return the hash of `words` in hex: a name that only a holder of the key can compute or link to the words.

    Each word is hashed with its length, so different lists never collide.
    person: domain separation; up to 16 bytes.
    """
    digest = blake2b(key=key, digest_size=_HASH_BYTES, person=person)
    for word in words:
        encoded = word.encode()
        digest.update(struct.pack("<I", len(encoded)) + encoded)
    return digest.hexdigest()
