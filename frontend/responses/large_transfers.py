"""Limit on concurrent transfers of large values to and from Redis, which would delay its smaller replies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from core.types.errors import CapacityError

_AT_A_TIME, _OF_TENANT = 4, 2
_WITHIN_S = 5.0


class LargeTransfers:
    """Limiter of one router, with a limit in all and one per tenant. Bound to its event loop."""

    def __init__(self, *, within_s: float = _WITHIN_S) -> None:
        self._within_s = within_s
        self._all = asyncio.Semaphore(_AT_A_TIME)
        self._of_tenant: dict[str, asyncio.Semaphore] = {}
        self._num_there: Counter[str] = Counter()  # transfers waiting or running, by tenant

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold a transfer slot for the duration of the block. Raises CapacityError if none becomes free in time."""
        own = self._of_tenant.setdefault(tenant, asyncio.Semaphore(_OF_TENANT))
        self._num_there[tenant] += 1
        try:
            async with asyncio.timeout(self._within_s) as waiting, own, self._all:
                waiting.reschedule(None)
                yield
        except TimeoutError:
            if not waiting.expired():
                raise
            raise CapacityError("too many large responses are being read; retry", retry_after_s=1.0) from None
        finally:
            self._num_there[tenant] -= 1
            if not self._num_there[tenant]:
                del self._num_there[tenant], self._of_tenant[tenant]
