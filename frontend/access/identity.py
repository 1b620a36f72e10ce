"""Identity of a client, and the request fields derived from it: tenant, prefix salt, priority, answer bound."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from core.identity.signing import keyed_hash
from core.types.api_key import ApiKey
from core.types.errors import RequestError
from core.types.request import OFFLINE
from frontend.text.completion_request import MAX_SALT_CHARS, MAX_USER_CHARS, CompletionRequest


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
