"""A key's limits around a request: taken before it, settled after it, and kept meanwhile."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from redis.exceptions import RedisError, ResponseError

from cluster.index.redis_client import RedisReach
from cluster.words.api_key import ApiKey
from cluster.words.errors import ClusterError, RateLimited, RequestError
from router.access.client import Client
from router.access.limiter import LEASE_S, Limiter, Reservation
from router.text.completion import Completion

logger = logging.getLogger(__name__)

_TRY_AGAIN_S = 1.0  # after Redis was found to be away


class Limits:
    """Lives on the router's event loop. Where Redis is away, or too slow, this router's own part of each limit counts:
    what was counted on the other side is not carried over."""

    def __init__(self, shared: Limiter | None, local: Limiter, *, try_again_s: float = _TRY_AGAIN_S) -> None:
        """shared: of all routers; None where there is none. try_again_s: after `shared` was found to be away."""
        self._try_again_s = try_again_s
        self._shared = shared
        self._local = local
        self._under_way: dict[str, tuple[Limiter, Reservation]] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._away_until = 0.0
        self._reach = RedisReach("this router's own part of each limit counts")
        self._has_failed = False  # for one key: Redis is there
        self._is_closing = False
        self._used_up: dict[str, tuple[float, RateLimited]] = {}  # by key: until when nothing can pass, and why

    @asynccontextmanager
    async def reserved(self, client: Client, completions: Sequence[Completion]) -> AsyncIterator[Mapping[str, str]]:
        """Hold a place for one request, which asks for all these, for as long as the block lasts.

        All the tokens that it might use are taken before it, and what it has not used is given back after it. Gives
        the headers that tell the client. Raises RateLimited, and RequestError where what is asked for is more than the
        key may have in a minute; answers without a bound get what that leaves.
        """
        key = client.key
        if key is None or not key.is_limited:
            yield {}
            return
        try:
            limiter, taken = await self._reserve(key, completions)
        except ClusterError as error:
            for one in completions[:1]:  # they are one request
                one.refuse(error)
            raise
        self._under_way[taken.id] = limiter, taken
        try:
            yield taken.standing.headers(key)
        finally:
            del self._under_way[taken.id]
            self._start(self._settle(limiter, taken, sum(one.used_tokens for one in completions)))

    def check(self, client: Client) -> None:
        """Raises RateLimited where it is known already that nothing passes: nothing is read or counted then."""
        if client.key and (found := self._used_up.get(client.key.id)):
            until, error = found
            if (left_s := until - time.monotonic()) > 0:
                raise RateLimited(str(error), retry_after_s=left_s, headers=error.headers)
            del self._used_up[client.key.id]

    async def keep_forever(self) -> None:
        """Renew what is under way: the places of a router that dies come back when their leases end."""
        while not self._is_closing:  # redis-py may swallow a cancellation
            await asyncio.sleep(LEASE_S / 3)
            try:
                await self._renew()
            except RedisError as error:
                self._note(error)

    def close(self) -> None:
        """Keep no longer."""
        self._is_closing = True

    async def settled(self) -> None:
        """Wait until what is over has been settled."""
        await asyncio.gather(*self._settling, return_exceptions=True)

    async def _reserve(self, key: ApiKey, completions: Sequence[Completion]) -> tuple[Limiter, Reservation]:
        if key.tpm is not None:
            _bound(completions, key.tpm)
        taking = asyncio.create_task(self._take(key, sum(one.most_tokens for one in completions)))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:  # the client has gone, and Redis may have counted it
            self._start(self._give_back(taking))
            raise
        except RateLimited as error:
            if error.is_certain and self._asks_shared:
                self._used_up[key.id] = time.monotonic() + error.retry_after_s, error
            raise

    async def _take(self, key: ApiKey, num_tokens: int) -> tuple[Limiter, Reservation]:
        id = secrets.token_hex(8)
        if self._shared is not None and self._asks_shared:
            try:
                if self._reach.is_away:  # leases have ended meanwhile, and what runs still counts
                    await self._renew()
                taken = await self._shared.take(key, id=id, num_tokens=num_tokens)
                self._reach.found()
                return self._shared, taken
            except RedisError as error:
                self._note(error)
        return self._local, await self._local.take(key, id=id, num_tokens=num_tokens)

    @property
    def _asks_shared(self) -> bool:
        return self._shared is not None and time.monotonic() >= self._away_until

    async def _settle(self, limiter: Limiter, taken: Reservation, used: int) -> None:
        try:
            await limiter.settle(taken, used=used)
        except RedisError as error:
            self._note(error)

    async def _renew(self) -> None:
        kept = [taken for limiter, taken in self._under_way.values() if limiter is self._shared]
        if self._shared is None or not kept:
            return
        await self._shared.renew(kept)
        for taken in kept:
            if taken.id not in self._under_way:  # over while it was being renewed, which may have come last
                await self._shared.settle(taken, used=taken.num_tokens)

    async def _give_back(self, taking: asyncio.Task[tuple[Limiter, Reservation]]) -> None:
        with suppress(ClusterError):
            limiter, taken = await taking
            await self._settle(limiter, taken, 0)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Nobody waits for it: the client has its answer."""
        task = asyncio.create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def _note(self, error: RedisError) -> None:
        if isinstance(error, ResponseError):  # it is there, and cannot count this: no reason to pass over other keys
            if not self._has_failed:
                logger.warning("Redis does not count for a key; this router's own part of its limits does: %s", error)
            self._has_failed = True
            return
        self._reach.missed(error)
        self._away_until = time.monotonic() + self._try_again_s


def _bound(completions: Sequence[Completion], tpm: int) -> None:
    """No more than `tpm` tokens for all of them. Raises RequestError."""
    num_prompt = sum(len(one.prompt_ids) for one in completions)
    if num_prompt > tpm:
        raise RequestError(f"prompt: has {num_prompt} tokens; this API key may have {tpm} a minute", param="prompt")
    if sum(one.most_tokens for one in completions) <= tpm:
        return
    unbounded = [one for one in completions if one.request.max_tokens is None]
    named = sum(one.max_answer_tokens for one in completions if one.request.max_tokens is not None)
    room = (tpm - num_prompt - named) // max(1, sum(one.n for one in unbounded))
    if not unbounded or room < max(1, *(one.request.min_tokens for one in unbounded)):
        raise RequestError(
            f"max_tokens: prompts and answers may have {tpm} tokens a minute with this API key", param="max_tokens"
        )
    for one in unbounded:
        one.bound_answers(room)
