"""Who asks, and what follows from that: whose prefixes, whose share, how urgent, how long an answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from core.identity.keyed_hash import keyed_hash
from core.types.api_key import ApiKey
from core.types.errors import RequestError
from core.types.request import OFFLINE
from frontend.text.completion_request import MAX_SALT_CHARS, MAX_USER_CHARS, CompletionRequest


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client whose key is known; or, where none is needed, anybody."""

    key: ApiKey | None  # None: it showed none
    # Of the deployment: without it nobody can tell beforehand a hash that a tenant or salt keys.
    salt_key: bytes = field(repr=False)
    is_cache_told: bool = True  # False among strangers, who share prefixes: it would tell what another one has sent

    @property
    def key_id(self) -> str:
        """Empty without a key."""
        return self.key.id if self.key else ""

    @property
    def tenant(self) -> str:
        """Whose all this is; empty without a key: of one tenant with all the others who show none."""
        return self.key.tenant if self.key else ""

    def bound(self, request: CompletionRequest) -> CompletionRequest:
        """The request with what is not the client's to say: tenant, salt, bounds. The same at both doors.

        Raises RequestError.
        """
        if len(request.cache_salt) > MAX_SALT_CHARS:
            raise RequestError(f"cache_salt: at most {MAX_SALT_CHARS} characters are taken", param="cache_salt")
        if len(request.user) > MAX_USER_CHARS:
            raise RequestError(f"user: at most {MAX_USER_CHARS} characters are taken", param="user")
        bound = replace(
            request,
            tenant=self.tenant,
            salt=salt_of(self.salt_key, tenant=self.tenant, cache_salt=request.cache_salt),
            is_cache_told=self.is_cache_told or bool(request.cache_salt),
        )
        return self._within_key(bound, self.key) if self.key else bound

    def _within_key(self, request: CompletionRequest, key: ApiKey) -> CompletionRequest:
        asked, most = request.max_tokens, key.max_tokens
        if asked is not None and most is not None and asked > most:
            param = request.max_tokens_field
            raise RequestError(f"{param}: this API key may ask for {most}, not {asked}", param=param)
        priority = request.priority
        # Every key may send offline requests: they run after all others, so a bound would only move them forward.
        if key.priorities and priority < OFFLINE:
            low, high = key.priorities
            priority = min(max(priority, low), high)
        return replace(request, key_id=key.id, max_answer=most, priority=priority)


def salt_of(key: bytes, *, tenant: str, cache_salt: str) -> str:
    """What keys the prefix hashes of a request: who has not both words shares no prefix with who has.

    Empty where both are: such requests share their prefixes with each other.
    """
    if not tenant and not cache_salt:
        return ""
    return keyed_hash(key, tenant, cache_salt, person=b"kv-prefix-salt")
