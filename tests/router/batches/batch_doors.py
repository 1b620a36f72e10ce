"""Doors with batches, each of a router of its own, over one Redis; and what a client does there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
from openai.types import Batch
from redis.asyncio import Redis

from core.index.redis_client import connect_redis
from core.process.supervisor import Supervisor
from frontend.access.access import Access
from frontend.http.app import create_app
from frontend.text.models import Models
from router.batches.batches import Batches
from router.batches.bounds import BatchBounds
from router.telemetry.metrics import Metrics
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.tiny_service import MakeCompletions
from tests.support.waiting import told

BOUNDS = BatchBounds(max_bytes=8 * 2**20)
CHAT = "/v1/chat/completions"
_KEY = bytes(range(32))


class BatchRouter:
    """A door, and clients of it."""

    def __init__(
        self, fake: FakeTokenService, models: Models, batches: Batches, address: str, metrics: Metrics
    ) -> None:
        self.fake = fake
        self.models = models
        self.address = address
        self._batches = batches
        self._metrics = metrics
        self._clients: list[openai.AsyncOpenAI] = []
        self.client = self.client_of("none")

    @property
    def metrics(self) -> str:
        return self._metrics.render().decode()

    def client_of(self, key: str) -> openai.AsyncOpenAI:
        self._clients.append(openai.AsyncOpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0))
        return self._clients[-1]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self._batches.leave()
        await self._batches.close()


@asynccontextmanager
async def batch_router(
    completions: MakeCompletions,
    redis_url: str,
    *,
    access: Access | None = None,
    bounds: BatchBounds = BOUNDS,
    at_a_time: int = 4,
    lease_s: float = 30.0,
    again_s: float = 0.5,
    fake: FakeTokenService | None = None,
    beside: Sequence[str] = (),
    client: Redis | None = None,
) -> AsyncIterator[BatchRouter]:
    """beside: other models than `tiny`, by their names."""
    fake, access = fake or FakeTokenService(), access or Access.anybody()
    batches = Batches(
        client or connect_redis(redis_url),
        bounds,
        name="d",
        key=_KEY,
        client_of=access.client_of,
        at_a_time=at_a_time,
        lease_s=lease_s,
        again_s=again_s,
    )
    service = completions(fake)
    models = Models(service)
    for name in beside:
        models.add(completions(FakeTokenService(), name=name))
    tasks = Supervisor()
    app = create_app(models, access=access, is_healthy=lambda: True, batches=batches)
    async with serve_http(app) as (host, port):
        router = BatchRouter(fake, models, batches, f"http://{host}:{port}", service.metrics)
        batches.start(tasks)
        try:
            yield router
        finally:
            await router.close()
            await tasks.close()


def chat_line(custom_id: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": custom_id}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 3} | body
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def sent(client: openai.AsyncOpenAI, content: bytes, *, endpoint: Any = CHAT, **more: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def ended(client: openai.AsyncOpenAI, batch: Batch, *, status: str = "completed") -> Batch:
    """As it is at its end."""

    async def at_its_end() -> Batch | None:
        found = await client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    found = await told(at_its_end)
    assert found and found.status == status, found
    return found


async def read(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]
