"""Access control of a router's endpoints: API keys with their limits, kept up to date, and the client of each request
with its tenant, prefix salt, priority and answer bound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from redis.asyncio import Redis
from redis.exceptions import RedisError

from core.identity.deployment_secrets import DeploymentSecrets, Purpose, keyed_hash
from core.index.key_channel import KeyReader
from core.index.redis_client import RedisReach, connect_redis
from core.process.supervisor import Supervisor
from core.types.api_key import OPERATOR, ApiKey, KeyRegistry, digest_of
from core.types.errors import ClusterError, KeysUnknown, RequestError, Unauthenticated, outcome_of
from core.types.request import OFFLINE
from frontend.access.limiter import LocalLimiter
from frontend.access.limits import Limits
from frontend.access.redis_limiter import RedisLimiter
from frontend.text.completion_request import MAX_SALT_CHARS, MAX_USER_CHARS, CompletionRequest

logger = logging.getLogger(__name__)

Count = Callable[[str], None]  # called with the outcome of a rejected request, by the metrics' names
_LIMITS_S = 0.5  # Redis timeout of a limit check, for which a request waits
_POLL_S = 0.4  # a created or revoked key takes effect at every router within a second
_SCHEME = "bearer "
_MAX_CHARS = 256


class Access:
    """Keys and limits, shared by both endpoints. Bound to the router's event loop."""

    def __init__(self, keyring: Keyring, limits: Limits, *redises: Redis, count: Count = lambda outcome: None) -> None:
        """redises: closed with this object. count: called for each request rejected without a key."""
        self._count = count
        self.limits = limits
        self._keyring = keyring
        self._redises = redises
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def follow(
        cls,
        credentials: DeploymentSecrets,
        *,
        name: str,
        is_required: bool,
        reports_cached_tokens: bool,
        num_routers: int,
        count: Count,
        tasks: Supervisor,
        known: KeyRegistry | None = None,
    ) -> Access:
        """Read the keys of the deployment `name` and follow their changes.

        tasks: supervisor of the background tasks. known: keys from the controller; an older registry in Redis is
        ignored. known=None: nothing is known yet.
        """
        url = credentials.index_url
        for_keys, for_limits = connect_redis(url), connect_redis(url, within_s=_LIMITS_S)
        keyring = Keyring(
            KeyReader(
                for_keys,
                name=name,
                signing_key=credentials.key(Purpose.API_KEYS),
                least_version=known.version if known else 0,
            ),
            salt_key=credentials.key(Purpose.SALTS),
            is_required=is_required,
            reports_cached_tokens=reports_cached_tokens,
        )
        limits = Limits(RedisLimiter(for_limits, name=name), LocalLimiter(num_routers=num_routers))
        access = cls(keyring, limits, for_keys, for_limits, count=count)
        if known:
            keyring.take(known)
        await keyring.read()
        access._tasks = [tasks.start("keys", keyring.follow_forever), tasks.start("limits", limits.keep_forever)]
        return access

    @classmethod
    def anybody(cls, salt_key: bytes = bytes(32)) -> Access:
        """Create access control without keys, for tests and keyless routers."""
        return cls(Keyring(None, salt_key=salt_key, is_required=False), Limits(None, LocalLimiter()))

    def identify(self, authorization: str | None, *, api_key: str | None = None) -> Client:
        """Return the client of a request from its `Authorization` and `X-Api-Key` headers. Raises Unauthenticated or
        KeysUnknown."""
        try:
            return self._keyring.identify(authorization, api_key=api_key)
        except ClusterError as error:
            self._count(outcome_of(error).code)
            raise

    @property
    def has_many_tenants(self) -> bool:
        """True if more than one tenant can send requests, so that fair shares matter. See Keyring."""
        return self._keyring.has_many_tenants

    async def close(self) -> None:
        self._keyring.close()
        self.limits.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.limits.settled()
        for redis in self._redises:
            await redis.aclose()


class Keyring:
    """API keys, kept in step with Redis; without it, the last known keys stay valid. Bound to the event loop."""

    def __init__(
        self, reader: KeyReader | None, *, salt_key: bytes, is_required: bool, reports_cached_tokens: bool = True
    ) -> None:
        """reader: None if the deployment has no keys. reports_cached_tokens: whether anonymous clients see cached-token
        counts."""
        self._reader = reader
        self._is_required = is_required
        self._anonymous = Client(key=None, salt_key=salt_key, reports_cached_tokens=reports_cached_tokens)
        self._clients: dict[str, Client] | None = None  # by digest of the secret; None: not read yet
        # More than one tenant can send requests. The operator key does not count, nor do anonymous clients of a
        # deployment without keys.
        self.has_many_tenants = False
        self._reach = RedisReach("the last known API keys stay valid")
        self._is_closing = False

    def identify(self, authorization: str | None, *, api_key: str | None = None) -> Client:
        """Return the client of a request from its `Authorization` or `X-Api-Key` header. Raises Unauthenticated or
        KeysUnknown.

        Secrets are looked up by digest, so the timing reveals nothing about a secret.
        """
        if api_key and (api_key := api_key.strip()):
            scheme, secret = _parts(authorization)
            if scheme.lower() == _SCHEME and secret not in ("", api_key):
                raise Unauthenticated("Authorization and X-Api-Key carry different API keys; send one of them")
            authorization = f"{_SCHEME}{api_key}"
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

    def take(self, registry: KeyRegistry) -> None:
        """Replace the keys with those of the registry."""
        salt_key = self._anonymous.salt_key
        self._clients = {key.digest: Client(key=key, salt_key=salt_key) for key in registry.keys}
        tenants = {key.tenant for key in registry.keys if key.name != OPERATOR}
        self.has_many_tenants = len(tenants) > (1 if self._is_required else 0)

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
        """Stop following the keys."""
        self._is_closing = True


def _parts(authorization: str | None) -> tuple[str, str]:
    return (authorization or "")[: len(_SCHEME)], (authorization or "")[len(_SCHEME) :].strip()


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
        for param, text, limit in (
            ("cache_salt", request.cache_salt, MAX_SALT_CHARS),
            ("user", request.user, MAX_USER_CHARS),
        ):
            if len(text) > limit:
                raise RequestError(f"{param}: has {len(text)} characters; at most {limit} are accepted", param=param)
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
