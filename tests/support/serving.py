"""A completion service behind both endpoints on free ports, and clients of each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import grpc
import httpx
import openai
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from openai.resources.responses import AsyncResponses

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub
from core.spec.schema import RouterSpec
from frontend.access.access import Access
from frontend.grpc.api import GrpcApi, open_grpc_api
from frontend.http.app import create_app
from frontend.http.connections import GRPC_ENDPOINT, ConnectionLimits
from frontend.responses.stored import StoredResponses
from frontend.text.completion import Completions, Models
from tests.frontend.access.keys import IssuedKey
from tests.support.fake_token_service import FakeTokenService
from tests.support.http_server import serve_http
from tests.support.memory_responses import in_memory_responses
from tests.support.plain_http import http_client
from tests.support.sdk_clients import anthropic_client, openai_client

USER: Any = [{"role": "user", "content": "hi"}]
_TEMPLATES = Path(__file__).parent.parent / "frontend" / "chat" / "templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(_TEMPLATES.glob("*.jinja"))}


class Refusal(NamedTuple):
    """Error of a gRPC call."""

    code: grpc.StatusCode
    text: str
    details: dict[str, Any]  # by type

    @property
    def fields(self) -> list[str]:
        return [violation.field for violation in self.details["BadRequest"].field_violations]


@dataclass
class Served:
    """Both endpoints of one service."""

    service: Completions  # the router's own, of several
    api: GrpcApi
    address: tuple[str, int]  # of the HTTP endpoint
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    stub: InferenceStub
    stack: AsyncExitStack
    is_healthy: bool = True

    @property
    def fake(self) -> FakeTokenService:
        assert isinstance(self.service.token_service, FakeTokenService)
        return self.service.token_service

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    @cached_property
    def client(self) -> openai.AsyncOpenAI:
        return self.openai()

    @property
    def responses(self) -> AsyncResponses:
        return self.client.responses

    def openai(self, key: IssuedKey | None = None, **options: Any) -> openai.AsyncOpenAI:
        client = openai_client(base_url=f"{self.url}/v1", api_key=key.secret if key else "none", **options)
        self.stack.push_async_callback(client.close)
        return client

    def anthropic(self, key: IssuedKey | None = None) -> anthropic.AsyncAnthropic:
        client = anthropic_client(base_url=self.url, api_key=key.secret if key else "none")
        self.stack.push_async_callback(client.close)
        return client

    def call(self, message: pb.GenerateRequest, key: IssuedKey | None = None, *, timeout: float = 30) -> Any:
        return self.stub.Generate(message, metadata=authorized(key), timeout=timeout)

    async def generate(
        self, message: pb.GenerateRequest, key: IssuedKey | None = None, *, timeout: float = 30
    ) -> list[pb.GenerateResponse]:
        return [response async for response in self.call(message, key, timeout=timeout)]

    async def rejected(
        self, message: pb.GenerateRequest, key: IssuedKey | None = None, *, timeout: float = 30
    ) -> Refusal:
        return await refusal(self.call(message, key, timeout=timeout))

    def say(self, *texts: str) -> None:
        """Answer each request with the next of these texts."""
        answers = [self.service.tokenizer.encode(f"{text}<|im_end|>") for text in texts]
        started = len(self.fake.started)
        self.fake.script = lambda *_: answers[min(len(self.fake.started) - started, len(answers)) - 1]

    @property
    def prompt(self) -> str:
        """Last prompt, as the model saw it."""
        return self.service.tokenizer.decode(self.fake.started[-1].token_ids, skip_special_tokens=False)


Serve = Callable[..., Awaitable[Served]]  # the fixture `serve`


@asynccontextmanager
async def serving(
    served: Completions | Models,
    *,
    access: Access | None = None,
    spec: RouterSpec | None = None,
    stored: StoredResponses | None = None,
    grpc_limits: ConnectionLimits = GRPC_ENDPOINT,
) -> AsyncIterator[Served]:
    """Serve both endpoints. access: None: open to anybody. spec, stored: None: the defaults."""
    access, models = access or Access.anybody(), Models.of(served)
    async with AsyncExitStack() as stack:
        stack.callback(models.default.close)
        api = await open_grpc_api(models, access=access, host="127.0.0.1", port=0, limits=grpc_limits)
        stack.push_async_callback(api.close, grace_s=0)
        app = create_app(
            models,
            access=access,
            is_healthy=lambda: opened.is_healthy,
            spec=spec or RouterSpec(),
            stored=stored or in_memory_responses(),
        )
        address = await stack.enter_async_context(serve_http(app))
        http = await stack.enter_async_context(http_client(base_url="http://{}:{}".format(*address)))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{api.port}"))
        opened = Served(models.default, api, address, http, channel, InferenceStub(channel), stack)
        yield opened


@asynccontextmanager
async def blocked_threads(service: Completions, *, num: int = 8) -> AsyncIterator[None]:
    """Occupy the service's threads for large texts with `num` pieces of work that end with the block."""
    go_on = threading.Event()
    holding = [asyncio.ensure_future(service.threads.run("", go_on.wait, 60)) for _ in range(num)]
    await asyncio.sleep(0)
    try:
        yield
    finally:
        go_on.set()
        await asyncio.gather(*holding)


def authorized(key: IssuedKey | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", key.header),) if key else ()


async def refusal(call: Any) -> Refusal:
    """Wait for a gRPC call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    status, details = rpc_status.from_call(caught.value), {}
    for packed in status.details if status else ():
        detail = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
        assert packed.Unpack(detail)
        details[type(detail).__name__] = detail
    return Refusal(caught.value.code(), caught.value.details() or "", details)
