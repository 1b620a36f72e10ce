"""The actor that owns the embedded Redis of a deployment, and brings it back at the same address when it dies."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from core.index.redis_server import RedisAddress, RedisServer
from core.types.errors import DeployError

logger = logging.getLogger(__name__)

ACTOR_NAME = "index"
_RETRY_S = 0.5


class EmbeddedIndex:
    """A detached actor that Ray restarts (max_restarts=-1). The server is a child of its event loop's thread."""

    async def __init__(self, address: RedisAddress, log_dir: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._server = RedisServer(address, log=Path(log_dir) / "index.log")
        self._first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep())

    async def ready(self) -> None:
        """Return when the server has answered. Raises DeployError when it could not be started."""
        await asyncio.shield(self._first_start)

    async def _keep(self) -> None:
        while True:
            try:
                self._server.start()  # blocks this loop for some 0.1 s; nothing else happens on it
            except (DeployError, OSError) as error:  # no memory, no file left: perhaps for a moment
                logger.error("the embedded Redis does not start: %s", error)
                if not self._first_start.done():
                    self._first_start.set_exception(error)
            else:
                if not self._first_start.done():
                    self._first_start.set_result(None)
                logger.warning("the embedded Redis ended with status %d", await asyncio.to_thread(self._server.wait))
            await asyncio.sleep(_RETRY_S)
