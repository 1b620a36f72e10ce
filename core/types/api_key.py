"""API keys: what a client shows at a door, and what the deployment keeps of it, which does not give it away."""

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

OPERATOR = "operator"  # the name of the key with which the operator's machine asks, and its tenant
_PREFIX = "sk-"
_SECRET_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HIGHEST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """One key. None: no limit of this kind."""

    id: str  # for logs; says nothing of the secret
    name: str  # the operator's word for whoever has it
    digest: str  # of the secret, in hex
    tenant: str  # whose prefixes, and whose share of the queue
    rpm: int | None = None  # requests in any minute
    tpm: int | None = None  # tokens in any minute, of prompts and answers
    concurrency: int | None = None  # requests at a time
    max_tokens: int | None = None  # of one answer
    priorities: tuple[int, int] | None = None  # lowest and highest number that it may ask for

    @property
    def is_limited(self) -> bool:
        """Whether its requests have to be counted."""
        return not self.rpm == self.tpm == self.concurrency is None


@dataclass(frozen=True, kw_only=True)
class KeyChange:
    """A key that was made or revoked."""

    key: ApiKey
    is_told: bool  # routers hear of it within a second; False: when Redis is back
    problem: str = ""  # of saving it, and what follows; empty: it is saved


@dataclass(frozen=True, kw_only=True)
class KeyRegistry:
    """All keys of a deployment. The version grows with every change."""

    version: int = 0
    keys: tuple[ApiKey, ...] = ()

    def with_key(self, key: ApiKey) -> KeyRegistry:
        """The same book where it has this very key: who asks may ask twice. Raises SpecError when its name is taken."""
        if key in self.keys:
            return self
        if any(known.name == key.name for known in self.keys):
            raise SpecError(f"a key is called {key.name} already; `cluster keys revoke {key.name}` takes it back")
        return replace(self, version=self.version + 1, keys=(*self.keys, key))

    def find(self, name: str) -> ApiKey:
        """The key of this name, or id. Raises SpecError where there is none."""
        for key in self.keys:
            if name in (key.name, key.id):
                return key
        raise SpecError(f"no key is called {name}; there are: {', '.join(key.name for key in self.keys) or 'none'}")

    def without(self, key: ApiKey) -> KeyRegistry:
        """The same book where it has no such key: who asks may ask twice."""
        kept = tuple(other for other in self.keys if other.id != key.id)
        return self if len(kept) == len(self.keys) else replace(self, version=self.version + 1, keys=kept)

    def to_json(self) -> str:
        return json.dumps({"version": self.version, "keys": [asdict(key) for key in self.keys]})

    @classmethod
    def from_json(cls, text: str | bytes) -> KeyRegistry:
        """Fields that a newer version has added are passed over. Raises ValueError, KeyError or TypeError."""
        tree = json.loads(text)
        return cls(version=int(tree["version"]), keys=tuple(_keys(tree["keys"])))


def new_secret() -> str:
    """256 random bits, as a client shows them."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: str) -> str:
    """What is kept of a secret. Of 256 random bits a plain hash is enough: there is nothing to guess."""
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
    """The tenant is the key's own name where none is given. Raises SpecError."""
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
    for what, word in (("NAME", key.name), ("--tenant", key.tenant)):
        if not isinstance(word, str) or not _NAME.fullmatch(word):
            raise SpecError(f"{what} {word!r}: write 1 to 64 letters, digits, dots, dashes and underscores")
    limits = {"--rpm": key.rpm, "--tpm": key.tpm, "--concurrency": key.concurrency, "--max-tokens": key.max_tokens}
    for what, limit in limits.items():
        if limit is not None and (not isinstance(limit, int) or not 1 <= limit <= _HIGHEST):
            raise SpecError(f"{what} {limit}: must be from 1 to {_HIGHEST}")
    if key.priorities:
        _check_priorities(*key.priorities, said=":".join(map(str, key.priorities)))


def parse_priorities(text: str) -> tuple[int, int]:
    """ "3", or "LOW:HIGH". Raises SpecError."""
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 1, 0
    _check_priorities(*bounds, said=text)
    return bounds


def _check_priorities(low: int, high: int, *, said: str) -> None:
    if not -(2**31) <= low <= high <= _HIGHEST:
        raise SpecError(f"--priority {said}: write a number, or the lowest and the highest one as LOW:HIGH")


def _keys(trees: Iterable[dict[str, Any]]) -> Iterator[ApiKey]:
    for tree in trees:
        fields = known_fields(ApiKey, tree)
        if fields.get("priorities") is not None:
            low, high = fields["priorities"]
            fields["priorities"] = (int(low), int(high))
        yield ApiKey(**fields)
