"""Clients for plain HTTP. They load no certificate authorities, which would take 20 ms for each client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.support import quick_uvicorn  # noqa: F401


def http_client(**options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=False, **options)


async def ask_forever(ask: Callable[[httpx.AsyncClient, int], Awaitable[None]], *, at_once: int) -> None:
    """Send numbered requests until cancelled, `at_once` at a time. ask: sends one request."""
    async with http_client() as client:
        number = 0
        while True:
            await asyncio.gather(*(ask(client, number + i) for i in range(at_once)))
            number += at_once
