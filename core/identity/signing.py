"""HMAC-SHA256 signatures: detect changes by writers without the key."""

from __future__ import annotations

import hmac

SIGNATURE_BYTES = 32

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
