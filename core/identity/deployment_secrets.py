"""Secrets shared by the processes of one deployment."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

_SECRET_BYTES = 32


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
