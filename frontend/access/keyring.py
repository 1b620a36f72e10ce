"""API keys of a router, and the client of a request: its tenant, prefix salt, priority and answer bound."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace

from redis.exceptions import RedisError

from core.identity.signing import keyed_hash
from core.index.key_channel import KeyReader
from core.index.redis_client import RedisReach
from core.types.api_key import OPERATOR, ApiKey, KeyRegistry, digest_of
from core.types.errors import KeysUnknown, RequestError, Unauthenticated
from core.types.request import OFFLINE
from frontend.text.completion_request import MAX_SALT_CHARS, MAX_USER_CHARS, CompletionRequest

logger = logging.getLogger(__name__)

_POLL_S = 0.4  # a created or revoked key takes effect at every router within a second
_SCHEME = "bearer "
_MAX_CHARS = 256


class Keyring:
    """API keys, followed from Redis; keeps the last known keys while Redis is unavailable. Bound to the event loop."""

    def __init__(
        self, reader: KeyReader | None, *, salt_key: bytes, is_required: bool, reports_cached_tokens: bool = True
    ) -> None:
        """reader: None: the deployment has no keys. reports_cached_tokens: whether anonymous clients see
        cached-token counts."""
        self._reader = reader
        self._is_required = is_required
        self._anonymous = Client(key=None, salt_key=salt_key, reports_cached_tokens=reports_cached_tokens)
        self._clients: dict[str, Client] | None = None  # by digest of the secret; None: not read yet
        self._has_many_tenants = False
        self._reach = RedisReach("the last known API keys stay valid")
        self._is_closing = False

    def identify(self, authorization: str | None, *, api_key: str | None = None) -> Client:
        """Return the client of a request from its `Authorization` or `X-Api-Key` header. Raises Unauthenticated or
        KeysUnknown.

        Secrets are looked up by digest, so the timing reveals nothing about a secret.
        """
        if api_key and (api_key := api_key.strip()):
            authorization = _same_key(authorization, f"{_SCHEME}{api_key}")
        scheme, secret = _parts(authorization)
        if scheme.lower() == _SCHEME and secret and len(secret) <= _MAX_CHARS:
            if client := (self._clients or {}).get(digest_of(secret)):
                return client
        if not self._is_required:
            return self._anonymous
        if self._clients is None:
            raise KeysUnknown("this router has not read the API keys yet; retry")
        if not authorization:
            raise Unauthenticated("an API key is needed: send it as Authorization: Bearer sk-…")
        if scheme.lower() != _SCHEME:
            raise Unauthenticated("Authorization has no Bearer scheme; send the API key as Authorization: Bearer sk-…")
        raise Unauthenticated("unknown or revoked API key")

    @property
    def has_many_tenants(self) -> bool:
        """True if more than one tenant can send requests. The operator key does not count, nor do
        anonymous clients of a deployment without keys."""
        return self._has_many_tenants

    def take(self, registry: KeyRegistry) -> None:
        """Replace the keys with those of the registry."""
        salt_key = self._anonymous.salt_key
        self._clients = {key.digest: Client(key=key, salt_key=salt_key) for key in registry.keys}
        tenants = {key.tenant for key in registry.keys if key.name != OPERATOR}
        self._has_many_tenants = len(tenants) > (1 if self._is_required else 0)

    async def read(self) -> None:
        """Read the registry from Redis if it has changed."""
        if self._reader is None:
            return
        try:
            if (registry := await self._reader.read()) is not None:
                self.take(registry)
                logger.info("API keys loaded num=%d version=%d", len(registry.keys), registry.version)
            self._reach.found()
        except RedisError as error:
            self._reach.missed(error)

    async def follow_forever(self) -> None:
        while self._reader is not None and not self._is_closing:  # redis-py may swallow a cancellation
            await self.read()
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """Stop following."""
        self._is_closing = True


def _parts(authorization: str | None) -> tuple[str, str]:
    return (authorization or "")[: len(_SCHEME)], (authorization or "")[len(_SCHEME) :].strip()


def _same_key(authorization: str | None, other: str) -> str:
    """Return `other`, after checking that both headers carry the same key. Raises Unauthenticated if they differ."""
    scheme, secret = _parts(authorization)
    if scheme.lower() == _SCHEME and secret and secret != _parts(other)[1]:
        raise Unauthenticated("Authorization and X-Api-Key carry different API keys; send one of them")
    return other


@dataclass(frozen=True, kw_only=True)
class Client:
    """Client of a request: an API key, or the anonymous client where no key is required."""

    key: ApiKey | None  # None: anonymous
    # Secret of the deployment: without it, a client could compute the prefix hash of another tenant or salt.
    salt_key: bytes = field(repr=False)
    # Whether cached-token counts are reported. False for anonymous clients that share prefixes with strangers:
    # the counts would reveal other clients' prompts.
    reports_cached_tokens: bool = True

    @property
    def key_id(self) -> str:
        """Id of the API key; empty without one."""
        return self.key.id if self.key else ""

    @property
    def tenant(self) -> str:
        """Tenant that owns the request; empty without a key: all anonymous clients are one tenant."""
        return self.key.tenant if self.key else ""

    def bound(self, request: CompletionRequest) -> CompletionRequest:
        """Return the request with the fields that the server sets: tenant, salt, bounds. Raises RequestError."""
        if len(request.cache_salt) > MAX_SALT_CHARS:
            raise RequestError(
                f"cache_salt: has {len(request.cache_salt)} characters; at most {MAX_SALT_CHARS} are accepted",
                param="cache_salt",
            )
        if len(request.user) > MAX_USER_CHARS:
            raise RequestError(
                f"user: has {len(request.user)} characters; at most {MAX_USER_CHARS} are accepted", param="user"
            )
        bound = replace(
            request,
            tenant=self.tenant,
            salt=salt_of(self.salt_key, tenant=self.tenant, cache_salt=request.cache_salt),
            reports_cached_tokens=self.reports_cached_tokens or bool(request.cache_salt),
        )
        return self._within_key(bound, self.key) if self.key else bound

    def _within_key(self, request: CompletionRequest, key: ApiKey) -> CompletionRequest:
        requested, limit = request.reserved_tokens, key.max_tokens
        if limit is not None and requested > limit:
            param = request.max_tokens_field
            raise RequestError(f"{param}: is {requested}; this API key allows at most {limit}", param=param)
        priority = request.priority
        # Every key may send offline requests: they run after all others, so a bound would only move them forward.
        if key.priorities and priority < OFFLINE:
            low, high = key.priorities
            priority = min(max(priority, low), high)
        return replace(request, key_id=key.id, max_answer=limit, priority=priority)


def salt_of(key: bytes, *, tenant: str, cache_salt: str) -> str:
    """Return the salt of a request's prefix hashes, so that only requests of the same tenant and cache_salt share KV.

    Empty if both are empty: such requests share their prefixes with each other.
    """
    if not tenant and not cache_salt:
        return ""
    return keyed_hash(key, tenant, cache_salt, person=b"kv-prefix-salt")
