"""The OpenAI door on a real port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI


@asynccontextmanager
async def serve_http(app: FastAPI, **options: Any) -> AsyncIterator[tuple[str, int]]:
    """Gives (host, port). The port listens from the start: nobody need wait for the server. options: uvicorn's."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5, **options)
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = True
        await serving
        listener.close()
