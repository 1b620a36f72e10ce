"""Asking Redis again and again, for what must not be lost by a pause of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

from core.index.redis_client import RedisReach

T = TypeVar("T")

_AGAIN_S = 0.5


class Patience:
    """Of a task that somebody cancels when it is to wait no longer."""

    def __init__(self, reach: RedisReach) -> None:
        self._reach = reach

    async def __call__(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What Redis tells, however often it has to be asked."""
        while True:
            try:
                told = await ask()
            except RedisError as error:
                self._reach.missed(error)
                if not is_cancelled():
                    await asyncio.sleep(_AGAIN_S)
                    continue
            if is_cancelled():
                raise asyncio.CancelledError
            self._reach.found()
            return told


def is_cancelled() -> bool:
    """Whether the task that asks is: redis-py may swallow that."""
    me = asyncio.current_task()
    return bool(me and me.cancelling())
