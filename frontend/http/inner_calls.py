"""Requests that no connection brings: this door asks itself, in the name of a client."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence

from starlette.types import ASGIApp, Message

from frontend.access.identity import Client
from frontend.openai.errors import OpenAIErrors
from router.batches.answering import LineAnswer

_LOST = 503
_RETRY_AFTER = b"retry-after"  # full, or its model is away: another time it is answered


class InnerCalls:
    """Implements router.batches.answering.LineEndpoint."""

    def __init__(self, app: ASGIApp, *, models: Callable[[], Sequence[str]], endpoints: Collection[str]) -> None:
        """app: behind the door's gate, for who asks is known. models: that are served, or are to be."""
        self._app = app
        self._models = models
        self.endpoints = endpoints

    @property
    def models(self) -> Sequence[str]:
        return self._models()

    async def answer(self, endpoint: str, body: bytes, client: Client) -> LineAnswer:
        request_id = uuid.uuid4().hex
        scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
            "client": None,
            "state": {"client": client, "request_id": request_id, "errors": OpenAIErrors()},
        }
        call = _Call(body)
        await self._app(scope, call.receive, call.send)
        is_for_now = _RETRY_AFTER in call.headers
        return LineAnswer(
            status=call.status,
            request_id=request_id,
            body=bytes(call.answer),
            retry_after_s=_retry_after_s(call.headers) if is_for_now else None,
            is_lost=call.status == _LOST and not is_for_now,
        )


class _Call:
    """Both ends of one request, whose client stays until it is answered."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status = 500
        self.headers: dict[bytes, bytes] = {}
        self.answer = bytearray()

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # until whoever wants to hear of the end does so no longer
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.answer += message.get("body", b"")


def _retry_after_s(headers: Mapping[bytes, bytes]) -> float:
    told = headers[_RETRY_AFTER]
    return float(told) if told.isdigit() and math.isfinite(float(told)) else 1.0
