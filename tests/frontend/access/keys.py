"""API keys and key registries for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.types.api_key import ApiKey, KeyRegistry, new_key, new_secret
from frontend.access.access import Access, Count, Keyring
from frontend.access.limiter import Limiter, LocalLimiter
from frontend.access.limits import Limits

SALT_KEY = bytes(range(32))
SEAL_KEY = bytes(reversed(range(32)))


@dataclass(frozen=True)
class IssuedKey:
    key: ApiKey
    secret: str

    @property
    def header(self) -> str:
        return f"Bearer {self.secret}"


def issue(name: str, **limits: Any) -> IssuedKey:
    secret = new_secret()
    return IssuedKey(new_key(name, secret, **limits), secret)


def book_of(*issued: IssuedKey, version: int = 1) -> KeyRegistry:
    return KeyRegistry(version=version, keys=tuple(one.key for one in issued))


def access_with(
    *issued: IssuedKey,
    is_required: bool = True,
    count: Count = lambda outcome: None,
    limiter: Limiter | None = None,
) -> Access:
    """Create access control with these keys, without Redis."""
    keyring = Keyring(None, salt_key=SALT_KEY, is_required=is_required)
    keyring.take(book_of(*issued))
    return Access(keyring, Limits(None, limiter or LocalLimiter()), count=count)
