"""How the two ends of a tcp link prove to each other that they are: by a key that the deployment's processes have.

    receiver ──> sender      its nonce
    sender   ──> receiver    its nonce, and a proof over both
    receiver ──> sender      a proof over both

Nothing that crosses the wire is of use to whoever reads it, now or later: each proof is for two fresh nonces, one link,
one side and one mode. Both nonces have 32 bytes, always: so what is signed can be read in one way only, whatever a
link's name is. The link's own key, where it is encrypted, comes from the same nonces. Pure.
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
    """What the two ends of one link must agree on."""

    secret: bytes
    link: str  # its name, which no other link ever has
    is_encrypted: bool

    def proof(self, *, receiver_nonce: bytes, sender_nonce: bytes, is_sender: bool) -> bytes:
        """Of who has `secret` and speaks for this side of this link."""
        side = b"sender" if is_sender else b"receiver"
        nonces = _joined(receiver_nonce, sender_nonce)
        return hmac.digest(self.secret, b"|".join((side, self._context)) + nonces, "sha256")

    def is_proved(self, proof: bytes, *, receiver_nonce: bytes, sender_nonce: bytes, is_sender: bool) -> bool:
        """Whether the other side's proof is right."""
        right = self.proof(receiver_nonce=receiver_nonce, sender_nonce=sender_nonce, is_sender=is_sender)
        return hmac.compare_digest(right, proof)

    def session_key(self, *, receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
        """32 bytes for what this connection carries, and nothing else."""
        salt = _joined(receiver_nonce, sender_nonce)
        return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=salt, info=self._context).derive(self.secret)

    @property
    def _context(self) -> bytes:
        return b"|".join((b"sealed" if self.is_encrypted else b"clear", self.link.encode()))


def _joined(receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
    assert len(receiver_nonce) == len(sender_nonce) == NONCE_BYTES, "whoever reads one makes sure of it"
    return receiver_nonce + sender_nonce
