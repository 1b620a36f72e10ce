"""API keys: the secrets that clients send, and the hashed records that a deployment stores."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

from core.types.errors import SpecError
from core.types.json_records import known_fields

# Name and tenant of the key that the operator's machine uses.
OPERATOR = "operator"
_PREFIX = "sk-"
_SECRET_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HIGHEST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """API key record. A limit of None is unlimited."""

    id: str  # for logs; unrelated to the secret
    name: str  # chosen by the operator
    digest: str  # sha256 of the secret, hex
    tenant: str  # scope of cached prefixes and of the queue share
    rpm: int | None = None  # requests in any minute
    tpm: int | None = None  # tokens in any minute, of prompts and answers
    concurrency: int | None = None  # requests at a time
    max_tokens: int | None = None  # of one answer
    priorities: tuple[int, int] | None = None  # lowest and highest number allowed

    @property
    def is_limited(self) -> bool:
        """True if requests of this key must be counted."""
        return not self.rpm == self.tpm == self.concurrency is None


@dataclass(frozen=True, kw_only=True)
class KeyChange:
    """Result of creating or revoking a key."""

    key: ApiKey
    is_published: bool  # True: routers apply the change within a second; False: once Redis is back
    problem: str = ""  # why saving the change failed, and the consequence; empty: saved


@dataclass(frozen=True, kw_only=True)
class KeyRegistry:
    """All keys of a deployment. Every change increments the version."""

    version: int = 0
    keys: tuple[ApiKey, ...] = ()

    def with_key(self, key: ApiKey) -> KeyRegistry:
        """Return a registry with `key`. Idempotent. Raises SpecError if another key has its name."""
        if key in self.keys:
            return self
        if any(known.name == key.name for known in self.keys):
            raise SpecError(f"a key is called {key.name} already; remove it with `cluster keys revoke {key.name}`")
        return replace(self, version=self.version + 1, keys=(*self.keys, key))

    def find(self, name: str) -> ApiKey:
        """Return the key with this name or id. Raises SpecError if there is none."""
        for key in self.keys:
            if name in (key.name, key.id):
                return key
        raise SpecError(f"no key is called {name}; there are: {', '.join(key.name for key in self.keys) or 'none'}")

    def without(self, key: ApiKey) -> KeyRegistry:
        """Return a registry without `key`. Idempotent."""
        others = tuple(other for other in self.keys if other.id != key.id)
        return self if len(others) == len(self.keys) else replace(self, version=self.version + 1, keys=others)

    def to_json(self) -> str:
        return json.dumps({"version": self.version, "keys": [asdict(key) for key in self.keys]})

    @classmethod
    def from_json(cls, text: str | bytes) -> KeyRegistry:
        """Parse a registry. Ignores unknown fields (of newer versions). Raises ValueError, KeyError or TypeError."""
        tree = json.loads(text)
        return cls(version=int(tree["version"]), keys=tuple(_keys(tree["keys"])))


def new_secret() -> str:
    """Return a new secret with 256 random bits, in the form that clients send."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: str) -> str:
    """Return the stored hash of a secret. A plain hash suffices: 256 random bits cannot be guessed."""
    return sha256(secret.encode()).hexdigest()


def new_key(
    name: str,
    secret: str,
    *,
    tenant: str | None = None,
    rpm: int | None = None,
    tpm: int | None = None,
    concurrency: int | None = None,
    max_tokens: int | None = None,
    priorities: tuple[int, int] | None = None,
) -> ApiKey:
    """Make a key for `secret`. The default tenant is the key's name. Raises SpecError."""
    key = ApiKey(
        id=f"key-{secrets.token_hex(4)}",
        name=name,
        digest=digest_of(secret),
        tenant=tenant or name,
        rpm=rpm,
        tpm=tpm,
        concurrency=concurrency,
        max_tokens=max_tokens,
        priorities=priorities,
    )
    _check(key)
    return key


def _check(key: ApiKey) -> None:
    for flag, word in (("NAME", key.name), ("--tenant", key.tenant)):
        if not isinstance(word, str) or not _NAME.fullmatch(word):
            raise SpecError(f"{flag} {word!r}: write 1 to 64 letters, digits, dots, dashes and underscores")
    limits = {"--rpm": key.rpm, "--tpm": key.tpm, "--concurrency": key.concurrency, "--max-tokens": key.max_tokens}
    for flag, limit in limits.items():
        if limit is not None and (not isinstance(limit, int) or not 1 <= limit <= _HIGHEST):
            raise SpecError(f"{flag} {limit}: must be from 1 to {_HIGHEST}")
    if key.priorities:
        _check_priorities(*key.priorities, text=":".join(map(str, key.priorities)))


def parse_priorities(text: str) -> tuple[int, int]:
    """Parse "3" or "LOW:HIGH". Raises SpecError."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 1, 0
    _check_priorities(*bounds, text=text)
    return bounds


def _check_priorities(low: int, high: int, *, text: str) -> None:
    if not -(2**31) <= low <= high <= _HIGHEST:
        raise SpecError(f"--priority {text}: write a number, or the lowest and the highest one as LOW:HIGH")


def _keys(trees: Iterable[dict[str, Any]]) -> Iterator[ApiKey]:
    for tree in trees:
        fields = known_fields(ApiKey, tree)
        if fields.get("priorities") is not None:
            low, high = fields["priorities"]
            fields["priorities"] = (int(low), int(high))
        yield ApiKey(**fields)
