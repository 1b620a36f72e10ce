"""An API key's limits around a request: reserve a slot before its body is read, charge tokens, settle at the end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.exceptions import RedisError

from core.index.redis_client import RedisReach, is_about_one_key
from core.types.api_key import ApiKey
from core.types.errors import ClusterError, RateLimited, RequestError
from frontend.access.limiter import LEASE_S, Limiter, Reservation, rejection
from frontend.text.completion import Completion

logger = logging.getLogger(__name__)

_RETRY_S = 1.0  # pause after Redis was found unavailable
_HOLD_S = 0.5  # maximum time to hold tokens for a request whose body is still being read; see WINDOW
Held: TypeAlias = tuple[Limiter, Reservation]


class Limits:
    """Limits of all keys. Falls back to this router's share of each limit while Redis is unavailable or slow; counts do
    not carry over. Bound to the router's event loop."""

    def __init__(
        self, shared: Limiter | None, local: Limiter, *, try_again_s: float = _RETRY_S, ahead_s: float = _HOLD_S
    ) -> None:
        """shared: limiter common to all routers; None: only the local one. try_again_s: pause after `shared` failed.
        ahead_s: how long tokens are held for a request whose token count is not known yet."""
        self._ahead_s = ahead_s
        self._try_again_s = try_again_s
        self._shared = shared
        self._local = local
        self._under_way: dict[str, Held] = {}  # by reservation id
        self._settling: set[asyncio.Task[None]] = set()
        self._unavailable_until = 0.0
        self._reach = RedisReach("this router enforces its own share of each limit")
        self._has_failed = False  # Redis answered with an error for one key
        self._is_closing = False
        self._used_up: dict[str, tuple[float, RateLimited]] = {}  # by key: rejected until then, and the error
        self._ahead: dict[str, int] = {}  # by key: decaying maximum of the tokens of its latest requests

    @asynccontextmanager
    async def entered(self, key: ApiKey | None) -> AsyncIterator[RequestContext]:
        """Hold a concurrency slot for one request for the duration of the block. Enter before its body is read.

        Counts as a request whatever its outcome. Raises RateLimited, also if the key has no token left.
        """
        if key is None or not key.is_limited:
            yield RequestContext(None, self._take_tokens)
            return
        self._check(key)
        request_context = RequestContext(place := await self._reserve(key), self._take_tokens)
        self._under_way[place[1].id] = place
        lapse = asyncio.get_running_loop().call_later(self._ahead_s, self._lapse, request_context)
        try:
            yield request_context
        finally:
            lapse.cancel()
            del self._under_way[place[1].id]
            self._start(self._leave(request_context, request_context.used_tokens))

    async def keep_forever(self) -> None:
        """Renew the leases of running requests; those of a dead router expire."""
        while not self._is_closing:  # redis-py may swallow a cancellation
            await asyncio.sleep(LEASE_S / 3)
            await self._ignoring_redis_errors(self._renew())

    def close(self) -> None:
        """Stop renewing leases."""
        self._is_closing = True

    async def settled(self) -> None:
        """Wait until all ended requests have been settled."""
        await asyncio.gather(*self._settling, return_exceptions=True)

    def _check(self, key: ApiKey) -> None:
        """Raise RateLimited from memory while the key is known to be exhausted."""
        if found := self._used_up.get(key.id):
            until, error = found
            if (left_s := until - time.monotonic()) > 0:
                raise RateLimited(str(error), retry_after_s=left_s, headers=error.headers)
            del self._used_up[key.id]

    async def _reserve(self, key: ApiKey) -> Held:
        entering = asyncio.create_task(self._enter(key))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:  # the client has disconnected, but Redis may have counted the request
            self._start(self._give_back(entering))
            raise
        except RateLimited as error:
            if error.is_certain and self._asks_shared:
                self._used_up[key.id] = time.monotonic() + error.retry_after_s, error
            raise

    async def _enter(self, key: ApiKey) -> Held:
        id, ahead = secrets.token_hex(8), self._ahead.get(key.id, 0)
        if self._shared is not None and self._asks_shared:
            try:
                if self._reach.is_unavailable:  # leases may have expired during the outage
                    await self._renew()
                taken = await self._shared.enter(key, id=id, ahead=ahead)
                self._reach.found()
                return self._shared, taken
            except RedisError as error:
                self._on_redis_error(error)
        return self._local, await self._local.enter(key, id=id, ahead=ahead)

    async def _take_tokens(self, request_context: RequestContext, num_tokens: int) -> Reservation:
        assert request_context.place
        limiter, taken = place = request_context.place
        latest = self._ahead.get(taken.key.id, 0)
        self._ahead[taken.key.id] = max(num_tokens, latest - (latest - num_tokens) // 8)
        request_context.is_charged = True
        if num_tokens <= taken.num_tokens:
            self._keep(request_context, num_tokens)
            return request_context.place[1]
        request_context.place = limiter, taken.with_tokens(0)
        # Shielded from a client's disconnect, so that tokens which Redis has counted are not lost.
        request_context.charging = asyncio.create_task(self._charge(place, num_tokens))
        return (await asyncio.shield(request_context.charging))[1]

    def _lapse(self, request_context: RequestContext) -> None:
        """Return the tokens taken ahead for a request that takes too long to read."""
        if not request_context.is_charged:
            self._keep(request_context, 0)

    def _keep(self, request_context: RequestContext, num_tokens: int) -> None:
        """Keep `num_tokens` of the tokens taken ahead and return the rest."""
        assert request_context.place
        limiter, taken = request_context.place
        request_context.place = limiter, taken.with_tokens(num_tokens)
        if spared := taken.num_tokens - num_tokens:
            self._start(self._ignoring_redis_errors(limiter.give_back(taken, num_tokens=spared)))

    async def _charge(self, place: Held, num_tokens: int) -> Held:
        limiter, taken = place
        try:
            return limiter, await limiter.charge(taken, num_tokens=num_tokens)
        except RedisError as error:
            self._on_redis_error(error)
        return self._local, await self._local.charge(taken.with_tokens(0), num_tokens=num_tokens)

    async def _leave(self, request_context: RequestContext, used: int) -> None:
        assert request_context.place
        (limiter, taken) = held = request_context.place
        if request_context.charging:
            with suppress(ClusterError):  # already reported to the request
                held = await request_context.charging
        if held[0] is not limiter:
            await self._ignoring_redis_errors(limiter.settle(taken, used=0))
        await self._ignoring_redis_errors(held[0].settle(held[1], used=used))

    @property
    def _asks_shared(self) -> bool:
        return self._shared is not None and time.monotonic() >= self._unavailable_until

    async def _ignoring_redis_errors(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            await call
        except RedisError as error:
            self._on_redis_error(error)

    async def _renew(self) -> None:
        leased = [taken for limiter, taken in self._under_way.values() if limiter is self._shared]
        if self._shared is None or not leased:
            return
        await self._shared.renew(leased)
        for taken in leased:
            if taken.id not in self._under_way:  # ended during the renewal, which may have arrived after it
                await self._shared.settle(taken, used=taken.num_tokens)

    async def _give_back(self, entering: asyncio.Task[Held]) -> None:
        with suppress(ClusterError):
            limiter, taken = await entering
            await self._ignoring_redis_errors(limiter.settle(taken, used=0))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background, because the client has its answer already."""
        task = asyncio.create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _on_redis_error(self, error: RedisError) -> None:
        if is_about_one_key(error):
            if not self._has_failed:
                logger.warning("Redis cannot count for one key; enforcing this router's share of its limits: %s", error)
            self._has_failed = True
            return
        self._reach.missed(error)
        self._unavailable_until = time.monotonic() + self._try_again_s


@dataclass(eq=False)
class RequestContext:
    """Admitted request with its reservation. Created by Limits, which settles it."""

    place: Held | None  # None: the key has no limits
    take_tokens: Callable[[RequestContext, int], Awaitable[Reservation]]
    charging: asyncio.Task[Held] | None = None  # pending charge, if the tokens taken ahead were too few
    is_charged: bool = False
    completions: Sequence[Completion] = ()

    @property
    def used_tokens(self) -> int:
        return sum(one.used_tokens for one in self.completions)

    def check(self, num_tokens: int) -> None:
        """Check cheaply, before tokenizing, that the key can pay for `num_tokens` tokens.

        Raises RateLimited, or RequestError if the key never can.
        """
        if self.place is None or (taken := self.place[1]).key.tpm is None:
            return
        if num_tokens > taken.key.tpm:
            text = f"prompt: needs at least {num_tokens} tokens; this API key allows {taken.key.tpm} tokens a minute"
            raise RequestError(text, param="prompt")
        if num_tokens > taken.key.tpm - taken.with_tokens(0).status.num_tokens:
            retry_s = taken.status.tokens_reset_s
            raise rejection(taken.key, "tokens", retry_after_s=retry_s, status=taken.status)

    async def charge(self, completions: Sequence[Completion]) -> Mapping[str, str]:
        """Take the maximum number of tokens of these completions, once, and return the rate-limit headers. Unused
        tokens are returned after the request.

        Raises RateLimited, or RequestError if the request exceeds the key's tokens per minute. Answers without
        reserved tokens are shortened to fit.
        """
        self.completions = completions
        if self.place is None:
            return {}
        _, taken = self.place
        try:
            if taken.key.tpm is not None:
                _fit(completions, taken.key.tpm)
                taken = await self.take_tokens(self, sum(one.most_tokens for one in completions))
        except ClusterError as error:
            for one in completions[:1]:  # one request counts once
                one.service.reject(one.request, error)
            raise
        return taken.status.headers(taken.key)


def _fit(completions: Sequence[Completion], tpm: int) -> None:
    """Shorten answers without reserved tokens, so that all completions fit into `tpm` tokens. Raises RequestError."""
    num_prompt = sum(len(one.prompt_ids) for one in completions)
    if num_prompt > tpm:
        text = f"prompt: has {num_prompt} tokens; this API key allows {tpm} tokens a minute"
        raise RequestError(text, param="prompt")
    if sum(one.most_tokens for one in completions) <= tpm:
        return
    unbounded = [one for one in completions if not one.request.reserved_tokens]
    named = sum(one.max_answer_tokens for one in completions if one.request.reserved_tokens)
    room = (tpm - num_prompt - named) // max(1, sum(one.num_choices for one in unbounded))
    if not unbounded or room < max(1, *(one.request.min_tokens for one in unbounded)):
        param = completions[0].request.max_tokens_field
        text = f"{param}: prompts and answers together exceed {tpm} tokens a minute, the limit of this API key"
        raise RequestError(text, param=param)
    for one in unbounded:
        one.shorten_answers(room)
