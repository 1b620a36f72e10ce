"""Redis client with many concurrent calls."""

from __future__ import annotations

import asyncio

from core.index.redis_client import connect_redis


async def test_concurrent_calls_wait_for_a_free_connection(redis_url: str) -> None:
    """An error instead would look like an outage, and suspend the limits of API keys."""
    client = connect_redis(redis_url)
    try:
        assert await asyncio.gather(*(client.echo(f"{number}") for number in range(300))) == [
            f"{number}".encode() for number in range(300)
        ]
        assert len(await client.client_list()) <= 100
    finally:
        await client.aclose()
