"""Responses of all HTTP APIs: streamed, whole, and errors. Their work stops once the client disconnects. The statuses
of errors are in core.types.errors; their format is in the request's state."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from core.types.errors import (
    CapacityError,
    ClusterError,
    RateLimited,
    RequestTooLarge,
    Unauthenticated,
    UnsupportedEncoding,
)
from frontend.http.body import SUPPORTED

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
COMMENT = b": keepalive\n\n"  # clients ignore it
JSON = dict[str, Any]
CLIENT_GONE = 499  # nginx's code for a disconnected client, for access logs
_BEHIND_V1 = ("chat", "completions", "models", "responses")
# Errors that are raised before the body has been read, with headers of their own.
_EARLY: Mapping[type[ClusterError], Mapping[str, str]] = {
    RequestTooLarge: {},
    Unauthenticated: {"www-authenticate": 'Bearer realm="cluster"'},
    UnsupportedEncoding: {"accept-encoding": SUPPORTED},
}
_DRAIN_BYTES = 64 * 1024 * 1024
_DRAIN_S = 5.0

_encode = msgspec.json.Encoder().encode
# Valid in JSON as they are, but clients that split a stream into lines as Unicode does would cut an event in two.
_LINE_ENDS = tuple((char.encode(), json.dumps(char).strip('"').encode()) for char in "\x85\u2028\u2029")


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
    """Streams `events` as they come, with keep-alives in between.

    The status is sent with the first event or keep-alive, so a request that fails before then gets its real status. A
    later failure is sent as the last events. The generator runs and is closed in one task.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        more_headers: Mapping[str, str],
        errors: ErrorForm,
        keepalive_s: float,
    ) -> None:
        """more_headers: sent in addition to those of every stream. errors: format of errors and keep-alives.
        keepalive_s: silence after which a keep-alive is sent."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **more_headers})
        del self.headers["content-length"]
        self._events = events
        self._errors = errors
        self._keepalive_s = keepalive_s
        self._has_started = False
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._sent_at = self._now()  # infinite while something is being sent
        self._keepalive: asyncio.Task[None] | None = None  # sends one; awaited before the next event is sent
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._keep_alive(send)
        try:
            async with aclosing(self._events) as events:
                while True:
                    try:
                        event = await anext(events, None)
                    except Exception as error:  # boundary: report any failure by the means that are left
                        if not self._has_started and not self._keepalive:
                            self._sent_at = math.inf  # no keep-alive beside the response
                            await error_response(error, self._errors)(scope, receive, send)
                            return
                        event = self._errors.events(error)
                    if event is None:
                        break
                    if self._keepalive:
                        await self._settled()
                    await self._send(event, send)
        finally:
            if self._timer:
                self._timer.cancel()
            if self._keepalive:
                self._keepalive.cancel()
                await asyncio.gather(self._keepalive, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, content: bytes, send: Send) -> None:
        self._sent_at = math.inf
        if not self._has_started:
            self._has_started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        self._sent_at = self._now()

    async def _settled(self) -> None:
        """Wait until no keep-alive is being sent."""
        while keepalive := self._keepalive:
            self._keepalive = None
            await keepalive

    def _keep_alive(self, send: Send) -> None:
        # Polled: a lock, a task or a timer for each event would cost more than the event.
        now = self._now()
        if now - self._sent_at >= self._keepalive_s:
            self._sent_at = math.inf
            self._keepalive = self._loop.create_task(self._send(self._errors.keepalive, send))
        wait_s = self._keepalive_s - max(0.0, now - self._sent_at)
        self._timer = self._loop.call_later(wait_s, self._keep_alive, send)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def to_json(content: object) -> bytes:
    """Encode as one line, by the rules of JSON as well as of Unicode."""
    encoded = _encode(content)
    if encoded.isascii():
        return encoded
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded


def json_answer(content: object, headers: Mapping[str, str]) -> Response:
    return Response(to_json(content), media_type="application/json", headers=dict(headers))


def handle_errors(app: FastAPI) -> None:
    """Give every error response of `app` the request's format, including that of an unknown route."""

    async def handle(request: Request, error: Exception) -> Response:
        return answer_to(request, error)

    for kind in (ClientDisconnect, ClusterError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def answer_to(request: Request, error: Exception) -> Response:
    """Return the response for an error, before anything has been sent."""
    form: ErrorForm = request.state.errors
    if isinstance(error, HTTPException):
        hint = _hint(request.url.path) if error.status_code == HTTPStatus.NOT_FOUND else ""
        message = f"{request.method} {request.url.path}: {error.detail}{hint}"
        body = form.http(error.status_code, phrase=error.detail, message=message)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)
    if isinstance(error, ClientDisconnect):  # raised while reading the body
        return Response(status_code=CLIENT_GONE)
    return error_response(error, form)


def error_response(error: BaseException, form: ErrorForm) -> Response:
    """Return the response for a request that failed before anything was sent."""
    status, body = form.whole(error)
    for kind, more in _EARLY.items():
        if isinstance(error, kind):
            return _EarlyAnswer(body, status_code=status, headers={"connection": "close", **more})
    headers = {"retry-after": str(math.ceil(error.retry_after_s))} if isinstance(error, CapacityError) else {}
    if isinstance(error, RateLimited):
        headers |= error.headers
    return JSONResponse(body, status_code=status, headers=headers)


def _hint(path: str) -> str:
    """Return a hint for a wrong base_url, if that explains the unknown path."""
    if path.startswith("/v1/v1/"):
        return "; the path has /v1 twice: the base_url of an Anthropic client ends without it"
    if path.split("/")[1] in _BEHIND_V1:
        return "; the base_url of an OpenAI client ends with /v1"
    return ""


class _EarlyAnswer(JSONResponse):
    """Error response sent before the request has been read.

    Sends the response at once, then reads and discards for a while. Closing with unread bytes would reset the
    connection, and a client that sends everything before it reads would never see the response.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if (b"expect", b"100-continue") not in scope["headers"]:  # otherwise the client has not sent the body
            await _discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    num_bytes = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while num_bytes < _DRAIN_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


class ErrorForm(Protocol):
    """Formats the error of one request, and the keep-alives of its stream."""

    keepalive: bytes  # sent while a stream has nothing else to send

    def whole(self, error: BaseException) -> tuple[int, dict[str, Any]]:
        """Return status and body of an error response."""
        ...

    def http(self, status: int, *, phrase: str, message: str) -> dict[str, Any]:
        """Return the body for an HTTP-level error. phrase: reason phrase of the status."""
        ...

    def events(self, error: BaseException) -> bytes:
        """Return the events that report `error` and end a started stream."""
        ...
