"""Secrets shared by the processes of one deployment, HMAC-SHA256 signatures that detect changes by writers without the
key, and keyed hashes of strings."""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

_SECRET_BYTES = 32
SIGNATURE_BYTES = 32
_HASH_BYTES = 16
_Bytes = bytes | bytearray | memoryview


class Purpose(StrEnum):
    """Purpose of a derived key. Up to 16 bytes."""

    MEMBERS = "member"  # signs member records
    ROUTERS = "routers"  # signs records of the routers' admin addresses
    LINKS = "link"  # authenticates the two ends of a link
    API_KEYS = "api keys"  # signs the registry of API keys
    SALTS = "cache salts"  # derives the salts of prefix hashes
    RESPONSES = "responses"  # names and signs stored responses
    TRAFFIC = "traffic"  # keys the hashes of recorded prompts
    REVISIONS = "revisions"  # signs the table of revisions and the counts


@dataclass(frozen=True, kw_only=True)
class DeploymentSecrets:
    """Secrets of a deployment, generated once and passed to each process at its start (core.types.launch).

    Never part of a command line, an environment or a log; hidden from repr.
    """

    secret: bytes = field(repr=False)  # the same in every process
    index_url: str = field(repr=False)  # of its Redis; may contain a password

    @classmethod
    def new(cls, *, index_url: str) -> DeploymentSecrets:
        return cls(secret=secrets.token_bytes(_SECRET_BYTES), index_url=index_url)

    def key(self, purpose: Purpose) -> bytes:
        """Derive a 32-byte key for one purpose. A leaked key reveals neither the other keys nor the secret."""
        return blake2b(key=self.secret, digest_size=32, person=purpose.value.encode()).digest()


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
