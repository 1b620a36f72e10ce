"""Mutual authentication of a tcp link's two ends by the deployment's shared secret. Pure.

    receiver ──> sender      nonce
    sender   ──> receiver    nonce, and an HMAC over both
    receiver ──> sender      an HMAC over both

An eavesdropper cannot reuse a proof: each covers two fresh nonces, one link, one side and one mode. Both nonces have
exactly 32 bytes, so the signed bytes parse in one way only, whatever the link's name is. An encrypted link derives its
session key from the same nonces.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

NONCE_BYTES = 32
PROOF_BYTES = 32
_KEY_BYTES = 32


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """Parameters that the two ends of one link must agree on."""

    secret: bytes
    link: str  # unique name
    is_encrypted: bool

    def proof(self, *, receiver_nonce: bytes, sender_nonce: bytes, is_sender: bool) -> bytes:
        """Return the HMAC-SHA256 that authenticates this side of the link."""
        side = b"sender" if is_sender else b"receiver"
        nonces = _joined(receiver_nonce, sender_nonce)
        return hmac.digest(self.secret, b"|".join((side, self._context)) + nonces, "sha256")

    def is_proved(self, proof: bytes, *, receiver_nonce: bytes, sender_nonce: bytes, is_sender: bool) -> bool:
        """Return whether `proof` is valid for the given side. Compares in constant time."""
        right = self.proof(receiver_nonce=receiver_nonce, sender_nonce=sender_nonce, is_sender=is_sender)
        return hmac.compare_digest(right, proof)

    def session_key(self, *, receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
        """Derive the 32-byte encryption key of this connection (HKDF-SHA256)."""
        salt = _joined(receiver_nonce, sender_nonce)
        return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=salt, info=self._context).derive(self.secret)

    @property
    def _context(self) -> bytes:
        return b"|".join((b"sealed" if self.is_encrypted else b"clear", self.link.encode()))


def _joined(receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
    assert len(receiver_nonce) == len(sender_nonce) == NONCE_BYTES, "nonces are read in full"
    return receiver_nonce + sender_nonce
