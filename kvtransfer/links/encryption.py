"""Payload encryption of a link: AES-GCM in pieces.

    encrypted payload    (up to 256 KiB of ciphertext, 16-byte tag), repeated

Both ends know the payload's size, so pieces need no length. Pieces are numbered over the lifetime of the link, and the
number is the nonce: a changed, dropped, repeated or reordered piece fails to decrypt. A piece fits into a CPU cache.
"""

from __future__ import annotations

from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from core.types.errors import LinkClosed

PIECE_BYTES = 256 << 10
TAG_BYTES = 16
_NONCE_BYTES = 12


def encrypted_size(num_bytes: int) -> int:
    """Return the size on the wire of a payload of `num_bytes` bytes."""
    return num_bytes + TAG_BYTES * -(-num_bytes // PIECE_BYTES)


class Cipher:
    """Cipher of one end of an encrypted link. Used by the link's thread only."""

    def __init__(self, key: bytes) -> None:
        """key: 32 bytes, used for this link and direction only."""
        self._aead = AESGCM(key)
        self._count = 0

    def encrypt(self, payload: memoryview, encrypted: memoryview) -> Iterator[int]:
        """Encrypt into `encrypted`, of encrypted_size(len(payload)) bytes. Yields the bytes filled after each piece."""
        for start, end in _pieces(len(payload)):
            into = encrypted[encrypted_size(start) : encrypted_size(end)]
            self._aead.encrypt_into(self._next_nonce(), payload[start:end], None, into)
            yield encrypted_size(end)

    def open(self, encrypted: memoryview, piece: memoryview) -> None:
        """Decrypt the next piece of a payload into `piece`. Raises LinkClosed if authentication fails."""
        try:
            self._aead.decrypt_into(self._next_nonce(), encrypted, None, piece)
        except InvalidTag:
            raise LinkClosed("tcp: received data failed authentication") from None

    def _next_nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(_NONCE_BYTES, "big")


def pieces(payload: memoryview) -> Iterator[memoryview]:
    """Split a payload into the pieces that are encrypted separately."""
    return (payload[start:end] for start, end in _pieces(len(payload)))


def _pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + PIECE_BYTES, num_bytes)) for start in range(0, num_bytes, PIECE_BYTES))
