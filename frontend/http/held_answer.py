"""Large JSON response, whose memory stays reserved until it has been sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PART_BYTES = 64 * 1024  # after each part the event loop runs other tasks, and a slow client is awaited


class HeldAnswer(Response):
    """JSON response, sent in parts. A client that takes too long to read it is disconnected."""

    def __init__(self, written: bytes, headers: Mapping[str, str], held: ExitStack, *, within_s: float) -> None:
        """held: closed at the end, whatever the outcome."""
        super().__init__(written, media_type="application/json", headers=dict(headers))
        self._held = held
        self._within_s = within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            try:
                async with asyncio.timeout(self._within_s):
                    await self._send_all(send)
            except TimeoutError:
                return  # the response is incomplete, so the server closes the connection

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for begin in range(0, len(self.body), _PART_BYTES):
            part = self.body[begin : begin + _PART_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
