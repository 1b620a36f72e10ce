"""HTTP listener on a free port, in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp

from frontend.http.connections import HTTP_ENDPOINT, HttpLimits, HttpListener
from tests.support import quick_uvicorn  # noqa: F401


@asynccontextmanager
async def serve_http(
    app: ASGIApp, *, host: str = "127.0.0.1", limits: HttpLimits = HTTP_ENDPOINT, **options: Any
) -> AsyncIterator[tuple[str, int]]:
    """Serve `app` and yield (host, port). options: further arguments of HttpListener.open."""
    listener = await HttpListener.open(app, host=host, port=0, limits=limits, **options)
    try:
        yield listener.address
    finally:
        await listener.close(grace_s=5)
