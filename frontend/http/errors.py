"""Errors over HTTP, with the status of core.types.errors: what is sent where nothing has been sent yet. In which
form, the request's state says."""

from __future__ import annotations

import asyncio
import math
from http import HTTPStatus

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from core.types.errors import CapacityError, ClusterError, RateLimited, RequestTooLarge, Unauthenticated
from frontend.http.error_format import ErrorForm

CLIENT_GONE = 499  # nobody reads it; nginx's number, for access logs
_BEHIND_V1 = ("chat", "completions", "models", "responses")
_DRAIN_BYTES = 64 * 1024 * 1024
_DRAIN_S = 5.0


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
        hint = _hint(request.url.path) if error.status_code == HTTPStatus.NOT_FOUND else ""
        message = f"{request.method} {request.url.path}: {error.detail}{hint}"
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


def _hint(path: str) -> str:
    """What a client's base_url should be, where that is why there is no such path."""
    if path.startswith("/v1/v1/"):
        return "; /v1 is there twice: the base_url of an Anthropic client ends without it"
    if path.split("/")[1] in _BEHIND_V1:
        return "; the base_url of an OpenAI client ends with /v1"
    return ""


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
