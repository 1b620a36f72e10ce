"""What only a holder of a key can say of some bytes, so that whoever else may write them changes nothing unseen."""

from __future__ import annotations

import hmac

SIGNATURE_BYTES = 32

_Bytes = bytes | bytearray | memoryview


def sign(key: bytes, *parts: _Bytes) -> bytes:
    """HMAC-SHA256, SEAL_BYTES of it. parts: what the data is, in words of a fixed length, and the data."""
    made = hmac.new(key, digestmod="sha256")
    for part in parts:
        made.update(part)
    return made.digest()


def signed(value: bytes, key: bytes, *words: bytes) -> bytes:
    """The seal of these words and the value, and behind it the value."""
    return sign(key, *words, value) + value


def verified(found: bytes, key: bytes, *words: bytes) -> bytes | None:
    """The value behind its seal; None where that is not its own."""
    shown, value = found[:SIGNATURE_BYTES], found[SIGNATURE_BYTES:]
    return value if is_signed(shown, key, *words, value) else None


def is_signed(shown: bytes, key: bytes, *parts: _Bytes) -> bool:
    """Whether `shown` is their seal. How long it takes says nothing of the right one."""
    return hmac.compare_digest(shown, sign(key, *parts))
