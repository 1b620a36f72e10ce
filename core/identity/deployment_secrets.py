"""What the processes of one deployment share, and nobody else has."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

_SECRET_BYTES = 32


class Purpose(StrEnum):
    """What the keys of a deployment are for: each has one of its own. Up to 16 bytes."""

    MEMBERS = "member"  # records of who serves are signed by it
    ROUTERS = "routers"  # records of where routers answer operators, likewise
    LINKS = "link"  # the two ends of a link prove by it where they belong
    API_KEYS = "api keys"  # seals the book of clients' keys
    SALTS = "cache salts"  # keys the salts of prefix hashes
    RESPONSES = "responses"  # names stored responses, and seals them
    TRAFFIC = "traffic"  # keys the hashes by which prompts are remembered
    REVISIONS = "revisions"  # seals which revisions serve, and what becomes of requests there


@dataclass(frozen=True, kw_only=True)
class DeploymentSecrets:
    """Made when a deployment is, and handed to each of its processes by whoever starts it (core.types.launch). Never
    in a command line, an environment or a log, and its repr shows nothing."""

    secret: bytes = field(repr=False)  # the same in every process
    index_url: str = field(repr=False)  # of its Redis; a password may be in it

    @classmethod
    def new(cls, *, index_url: str) -> DeploymentSecrets:
        return cls(secret=secrets.token_bytes(_SECRET_BYTES), index_url=index_url)

    def key(self, purpose: Purpose) -> bytes:
        """32 bytes for one use alone: who finds out the key of one use knows that of no other, nor the secret."""
        return blake2b(key=self.secret, digest_size=32, person=purpose.value.encode()).digest()
