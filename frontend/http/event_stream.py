"""Server-sent events and whole responses; both stop their work as soon as the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.http.error_format import ErrorForm
from frontend.http.errors import CLIENT_GONE, error_response
from frontend.http.json_response import json_answer, to_json

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def data(content: dict[str, Any], *, name: str = "") -> bytes:
    """Encode one event. name: empty if it has none."""
    event = b"data: %b\n\n" % to_json(content)
    return b"event: %b\n%b" % (name.encode(), event) if name else event


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work` in a task, and cancel it if the client disconnects or the caller is cancelled.

    Returns after the work has ended; None if it was cut short. A server reports a disconnect either by an
    http.disconnect message, which has to be received, or by cancelling the application.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() and not working.cancelled() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def whole_answer(
    receive: Receive, work: Coroutine[Any, Any, dict[str, Any]], headers: Mapping[str, str]
) -> Response:
    """Return the response to `work`'s result, or an empty one if the client disconnects."""
    whole = await while_connected(receive, work)
    if whole is None:
        return Response(status_code=CLIENT_GONE)
    return json_answer(whole, headers)


class EventStream(Response):
    """Streams `events` as they come.

    The first event is awaited before the status is sent, so a request that fails at once gets its real status. A
    later failure is sent as the last event. The generator runs and is closed in one task.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, more_headers: Mapping[str, str], errors: ErrorForm
    ) -> None:
        """more_headers: sent in addition to those of every stream. errors: error format."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._more_headers = more_headers
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        async with aclosing(self._events) as events:
            while True:
                try:
                    event = await anext(events, None)
                except Exception as error:  # boundary: report any failure by the means that are left
                    if not has_started:
                        await error_response(error, self._errors)(scope, receive, send)
                        return
                    name, content = self._errors.event(error)
                    event = data(content, name=name)
                if event is None:
                    break
                if not has_started:
                    self.headers.update(self._more_headers)
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    has_started = True
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
