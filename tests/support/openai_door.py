"""A running OpenAI endpoint and its clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import openai

from frontend.access.access import Access
from frontend.http.app import create_app
from frontend.text.completion import Completions
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.plain_http import http_client
from tests.support.sdk_clients import openai_client
from tests.support.tiny_service import MakeCompletions

USER = [{"role": "user", "content": "hi"}]


@dataclass
class OpenAIEndpoint:
    service: Completions
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    is_healthy: bool = True

    @property
    def fake(self) -> FakeTokenService:
        assert isinstance(self.service.token_service, FakeTokenService)
        return self.service.token_service


@asynccontextmanager
async def open_openai_endpoint(completions: MakeCompletions) -> AsyncIterator[OpenAIEndpoint]:
    service = completions(FakeTokenService())
    app = create_app(service, access=Access.anybody(), is_healthy=lambda: endpoint.is_healthy)
    async with serve_http(app) as (host, port), http_client(base_url=f"http://{host}:{port}") as http:
        async with openai_client(base_url=f"http://{host}:{port}/v1", api_key="none") as client:
            endpoint = OpenAIEndpoint(service, http, client)
            yield endpoint
