"""ASGI middleware for tracing of generation requests, continuing the client's `traceparent`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send

from router.telemetry.tracing import Trace, Tracing


class HttpTraces:
    """Traces POST requests to given paths. `add_trace_header` returns the `traceparent` in the response headers."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing, paths: Collection[str]) -> None:
        """paths: traced paths."""
        self._app = app
        self._tracing = tracing
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            return await self._app(scope, receive, send)
        trace = self._tracing.begin(f"POST {scope['path']}", Headers(scope=scope))
        if trace is None:
            return await self._app(scope, receive, send)
        scope.setdefault("state", {})["trace"] = trace
        try:
            await self._app(scope, receive, send)
        finally:
            status = scope["state"].get("status", 0)
            trace.end(status=str(status) if status else "", is_our_fault=status >= 500)


def add_trace_header(state: dict[str, Any], headers: MutableHeaders, status: int) -> None:
    """Add the traceparent to the response headers. Called by the middleware that edits headers anyway: wrapping
    `send` once more would cost per token."""
    if (trace := state.get("trace")) is not None:
        headers["traceparent"] = trace.traceparent
        state["status"] = status


def trace_of(scope: Scope) -> Trace | None:
    """Return the request's trace, or None if it is not traced."""
    trace: Trace | None = scope["state"].get("trace")
    return trace
