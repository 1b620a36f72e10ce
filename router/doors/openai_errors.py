"""Errors over HTTP, with the status of cluster.words.errors; and OpenAI's form of them: {"error": {"message", "type",
"param", "code"}}."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cluster.words.errors import (
    CapacityError,
    ClusterError,
    RateLimited,
    RequestError,
    RequestTooLarge,
    Unauthenticated,
    UnsupportedField,
    outcome_of,
)
from router.doors.error_form import ErrorForm
from router.doors.openai_fields import UNSUPPORTED

logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody reads it; nginx's number, for access logs
_DRAIN_BYTES = 64 * 1024 * 1024
_DRAIN_S = 5.0
_MAX_PATH = 128


class OpenAIErrors:
    """The form of every endpoint that has none of its own."""

    def whole(self, error: BaseException) -> tuple[int, dict[str, Any]]:
        return outcome_of(error).http, error_body(error)

    def http(self, status: int, *, phrase: str, message: str) -> dict[str, Any]:
        return http_error(phrase, message)

    def event(self, error: BaseException) -> tuple[str, dict[str, Any]]:
        return "", error_body(error)


def handle_errors(app: FastAPI) -> None:
    """Every answer of `app` that is an error gets its request's form, an unknown route's too."""

    async def handle(request: Request, error: Exception) -> Response:
        return answer_to(request, error)

    for kind in (ClientDisconnect, ClusterError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def answer_to(request: Request, error: Exception) -> Response:
    """What a request hears of an error, before anything was sent. Its state says in which form."""
    form: ErrorForm = request.state.errors
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = form.http(error.status_code, phrase=error.detail, message=message)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)
    if isinstance(error, ClientDisconnect):  # while it was sending the body
        return Response(status_code=CLIENT_GONE)
    return error_response(error, form)


def error_response(error: BaseException, form: ErrorForm) -> Response:
    """The whole answer to a request that failed before anything was sent."""
    status, body = form.whole(error)
    if isinstance(error, RequestTooLarge):
        return _EarlyAnswer(body, status_code=status, headers={"connection": "close"})
    if isinstance(error, Unauthenticated):
        headers = {"connection": "close", "www-authenticate": 'Bearer realm="cluster"'}
        return _EarlyAnswer(body, status_code=status, headers=headers)
    headers = {"retry-after": str(math.ceil(error.retry_after_s))} if isinstance(error, CapacityError) else {}
    if isinstance(error, RateLimited):
        headers |= error.headers
    return JSONResponse(body, status_code=status, headers=headers)


def error_body(error: BaseException) -> dict[str, Any]:
    """The error object; what is not ours is logged here, and not shown."""
    outcome = outcome_of(error)
    if not isinstance(error, ClusterError):
        logger.error("request failed by a bug", exc_info=error)
        return _body("internal error; the router's log says more", type=outcome.type, code=outcome.code)
    param = error.param if isinstance(error, RequestError) else None
    return _body(str(error), type=outcome.type, code=outcome.code, param=param)


def http_error(phrase: str, message: str) -> dict[str, Any]:
    """The error object of what HTTP itself calls wrong. phrase: that of the status."""
    return _body(message, type="invalid_request_error", code=phrase.lower().replace(" ", "_"))


def explain(error: ValidationError) -> RequestError:
    """The first thing that is wrong with a body, by its path, such as messages[0].content."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    path = path[:_MAX_PATH]  # a client's own field may have any name
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
    kind = UnsupportedField if first["type"] == UNSUPPORTED else RequestError
    return kind(f"{path}: {message}" if path else f"the body {message}", param=path or None)


def _body(message: str, *, type: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


class _EarlyAnswer(JSONResponse):
    """An answer before the request was read.

    The answer goes out at once. Then we read on for a while and throw away: closed with bytes unread, TCP would reset
    the connection, and a client that sends everything before it looks would never see why.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        if (b"expect", b"100-continue") not in scope["headers"]:  # such a client waits for our word, and has it now
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
