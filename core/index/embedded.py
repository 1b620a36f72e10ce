"""Actor that runs the embedded Redis of a deployment and restarts it at the same address when it dies."""

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
    """Detached actor that Ray restarts (max_restarts=-1). The thread of its event loop owns the server."""

    async def __init__(self, address: RedisAddress, log_dir: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self._server = RedisServer(address, log=Path(log_dir) / "index.log")
        self._first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep())

    async def ready(self) -> None:
        """Wait until the server answers. Raises DeployError if its first start fails."""
        await asyncio.shield(self._first_start)

    async def _keep(self) -> None:
        last_error = ""
        while True:
            try:
                self._server.start()  # blocks this loop for about 0.1 s; the loop has no other work
            except (DeployError, OSError) as error:  # possibly temporary, such as too little memory
                if last_error != (last_error := str(error)):
                    logger.error("failed to start the embedded Redis: %s", error)
                if not self._first_start.done():
                    self._first_start.set_exception(error)
            else:
                if not self._first_start.done():
                    self._first_start.set_result(None)
                logger.warning("embedded Redis exited status=%d", await asyncio.to_thread(self._server.wait))
            await asyncio.sleep(_RETRY_S)
