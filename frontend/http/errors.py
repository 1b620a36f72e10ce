"""Error responses over HTTP, before anything has been sent. Statuses: core.types.errors; format: request state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol

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
from frontend.http.content_encoding import SUPPORTED

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
