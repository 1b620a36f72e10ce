"""The tokens of one request on their way to its client."""

from __future__ import annotations

import asyncio

from cluster.words.errors import ClusterError
from cluster.words.request import SampledToken


class Outbox:
    """Whoever takes gets all that have come meanwhile: a client that is behind, or a busy router, handles them
    together. Belongs to the event loop; one takes."""

    def __init__(self) -> None:
        self.num_waiting = 0  # tokens
        self._tokens: dict[int, list[SampledToken]] = {}  # by choice
        self._is_over = False
        self._error: ClusterError | None = None
        self._came = asyncio.Event()

    def put(self, choice: int, token: SampledToken) -> None:
        self._tokens.setdefault(choice, []).append(token)
        self.num_waiting += 1
        self._came.set()

    def end(self, error: ClusterError | None = None) -> None:
        """No more come. The first word counts."""
        if not self._is_over:
            self._is_over, self._error = True, error
            self._came.set()

    async def take(self) -> dict[int, list[SampledToken]]:
        """At least one, or none at the end. Raises the error with which it ended, after the last token."""
        while not self._tokens and not self._is_over:
            self._came.clear()
            await self._came.wait()
        if not self._tokens and self._error:
            raise self._error
        taken, self._tokens, self.num_waiting = self._tokens, {}, 0
        return taken
