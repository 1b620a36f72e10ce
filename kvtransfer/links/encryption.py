"""Payloads as they travel over an encrypted link: authenticated encryption, piece by piece.

    sealed payload    (ciphertext of up to 256 KiB, its tag of 16 bytes), again and again

Both ends know a payload's size beforehand, so nothing says where a piece ends. Pieces are numbered over the life of the
link, one way: a piece that was changed, left out, repeated or moved does not open. A piece stays in a processor's cache
between the wire and its place.
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
    """What a payload of so many bytes takes on the wire."""
    return num_bytes + TAG_BYTES * -(-num_bytes // PIECE_BYTES)


class Cipher:
    """One end of one encrypted link. Belongs to the link's thread."""

    def __init__(self, key: bytes) -> None:
        """key: 32 bytes, of this link and this direction alone."""
        self._aead = AESGCM(key)
        self._count = 0

    def fill_block(self, payload: memoryview, encrypted: memoryview) -> Iterator[int]:
        """Fill `encrypted`, of sealed_size(len(payload)) bytes, piece by piece; after each, how much is filled."""
        for start, end in _pieces(len(payload)):
            into = encrypted[encrypted_size(start) : encrypted_size(end)]
            self._aead.encrypt_into(self._next_nonce(), payload[start:end], None, into)
            yield encrypted_size(end)

    def open(self, encrypted: memoryview, piece: memoryview) -> None:
        """Fill `piece`, the next one of a payload. Raises LinkClosed if this is not what the other end has sealed."""
        try:
            self._aead.decrypt_into(self._next_nonce(), encrypted, None, piece)
        except InvalidTag:
            raise LinkClosed("tcp: what came is not what was sent") from None

    def _next_nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(_NONCE_BYTES, "big")


def pieces(payload: memoryview) -> Iterator[memoryview]:
    """A payload in the pieces in which it is sealed."""
    return (payload[start:end] for start, end in _pieces(len(payload)))


def _pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + PIECE_BYTES, num_bytes)) for start in range(0, num_bytes, PIECE_BYTES))
