"""What the processes of one deployment share, and nobody else has."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from hashlib import blake2b

_SECRET_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Made when a deployment is, and handed to each of its processes by whoever starts it: what Ray starts gets them
    as an actor's argument, which is in Ray's control store. Never in a command line, an environment or a log."""

    secret: bytes = field(repr=False)  # the same in every process

    @classmethod
    def new(cls) -> Credentials:
        return cls(secret=secrets.token_bytes(_SECRET_BYTES))

    @classmethod
    def from_plain(cls, tree: dict[str, str]) -> Credentials:
        return cls(secret=bytes.fromhex(tree["secret"]))

    def to_plain(self) -> dict[str, str]:
        return {"secret": self.secret.hex()}

    def key(self, purpose: str) -> bytes:
        """32 bytes for one use alone: who finds out the key of one use knows that of no other, nor the secret.

        purpose: up to 16 bytes.
        """
        return blake2b(key=self.secret, digest_size=32, person=purpose.encode()).digest()
