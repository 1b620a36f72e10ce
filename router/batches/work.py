"""What a router works on: batches on which nobody else does, as many at a time as are of different tenants."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time

from redis.exceptions import RedisError

from core.index.redis_client import RedisReach
from core.process.supervisor import Supervisor
from router.batches.job import BatchJob, Workplace
from router.batches.patience import is_cancelled
from router.batches.redis_batches import HashedPlace

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # for a batch that nobody works on
_SWEEP_S = 30.0
_MAX_JOBS = 16  # at a time


class BatchWork:
    """Owns the jobs of one router. Lives on its event loop."""

    def __init__(self, workplace: Workplace) -> None:
        self._workplace = workplace
        self._store = workplace.store
        self._jobs: dict[asyncio.Task[None], tuple[HashedPlace, str]] = {}  # with the token of each lease
        self._task: asyncio.Task[None] | None = None
        self._has_come = asyncio.Event()
        self._reach = RedisReach("no batch is begun")

    def start(self, tasks: Supervisor) -> None:
        self._task = tasks.start("batches", self._run_forever)

    def look(self) -> None:
        """A batch has come."""
        self._has_come.set()

    async def close(self) -> None:
        """Leave what this router works on to the others, at once."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        jobs = dict(self._jobs)
        for task in jobs:
            task.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        for place, token in jobs.values():
            try:
                await self._store.release(place, token)
            except RedisError as error:
                self._reach.missed(error)  # its lease ends by itself

    async def _run_forever(self) -> None:
        swept_at = time.monotonic() - _SWEEP_S
        while True:
            self._has_come.clear()
            try:
                while len(self._jobs) < _MAX_JOBS and await self._begin_one():
                    pass
                if time.monotonic() - swept_at >= _SWEEP_S:
                    await self._store.sweep()
                    swept_at = time.monotonic()
                self._reach.found()
            except RedisError as error:
                self._reach.missed(error)
            if is_cancelled():
                return
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._has_come.wait()
            except TimeoutError:
                pass

    async def _begin_one(self) -> bool:
        """Whether there was one."""
        token = secrets.token_hex(16)
        tenants = {place.tenant for place, _ in self._jobs.values()}
        place = await self._store.claim(token, lease_s=self._workplace.lease_s, tenants=tenants)
        if place is None:
            return False
        record = await self._store.batch(place)
        if record is None:
            logger.error("a batch whose record is not this deployment's is left alone")
            return False
        task = asyncio.create_task(BatchJob(self._workplace, place, token, record).run())
        self._jobs[task] = place, token
        task.add_done_callback(self._ended)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._jobs[task]
        self._has_come.set()
        if not task.cancelled() and (error := task.exception()):
            logger.error("work on a batch failed by a bug; it is taken up again", exc_info=error)
