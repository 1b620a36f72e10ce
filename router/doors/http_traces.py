"""ASGI middleware: requests that bring answers are traced, from the client's `traceparent` on."""

from __future__ import annotations

from collections.abc import Awaitable, Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.tracing import Trace, Tracing


class HttpTraces:
    """The client hears of its request's `traceparent` in the headers of the answer."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing, paths: Collection[str]) -> None:
        """paths: of what is traced, by POST."""
        self._app = app
        self._tracing = tracing
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            return await self._app(scope, receive, send)
        trace = self._tracing.begin(f"POST {scope['path']}", Headers(scope=scope))
        scope.setdefault("state", {})["trace"] = trace
        status = 0

        def send_with_trace(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["traceparent"] = trace.traceparent
            return send(message)

        try:
            await self._app(scope, receive, send_with_trace)
        finally:
            trace.end(status=str(status) if status else "", is_our_fault=status >= 500)


def trace_of(scope: Scope) -> Trace | None:
    """None where it is not traced."""
    trace: Trace | None = scope["state"].get("trace")
    return trace
