"""gRPC and OpenAI clients for load tests: send a prompt, receive tokens."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
from grpc import aio

from core.rpc import inference_pb2 as pb
from core.rpc import inference_pb2_grpc as rpc
from core.types.errors import RequestFailed
from core.wire.client_access import EndpointAccess

# With several endpoints, a silent one is abandoned soon and the next one is tried.
_CONNECT_S = 1.0
_QUICK = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000),
)
_GONE = (httpx.NetworkError, httpx.ConnectTimeout, httpx.RemoteProtocolError)


@dataclass(frozen=True, kw_only=True)
class ReportedUsage:
    """Usage that the deployment reports for an answered request."""

    prompt_tokens: int
    # Part of prompt_tokens that came from the prefix cache.
    cached_tokens: int


class Endpoint(Protocol):
    """Connection to a deployment, used on one event loop."""

    def ask(
        self, token_ids: Sequence[int], *, max_tokens: int, timeout_s: float
    ) -> AsyncGenerator[int | ReportedUsage, None]:
        """Generate exactly `max_tokens` tokens, greedily. Yields the token count of each event, and the usage last.

        Leaving the iteration cancels the request. Raises RequestFailed.
        """
        ...


@asynccontextmanager
async def open_endpoint(endpoint: str, access: EndpointAccess) -> AsyncIterator[Endpoint]:
    """Connect to HOST:PORT (gRPC) or http(s)://HOST:PORT (OpenAI API), or to several separated by commas.

    Raises SpecError.
    """
    if endpoint.startswith(("http://", "https://")):
        # The load determines the number of connections.
        no_limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        verify = access.ssl_context() if endpoint.startswith("https://") else True
        quick = _QUICK if "," in endpoint else None
        transport = httpx.AsyncHTTPTransport(verify=verify, limits=no_limits, trust_env=False, socket_options=quick)
        async with httpx.AsyncClient(headers=access.headers, transport=transport) as client:
            yield OpenAIClient(client, endpoint.split(","), model=access.model)
    else:
        async with access.channel(endpoint) as channel:
            yield GrpcClient(channel, metadata=access.metadata, model=access.model)


class GrpcClient:
    """Endpoint over cluster.v1.Inference."""

    def __init__(self, channel: aio.Channel, *, metadata: tuple[tuple[str, str], ...], model: str = "") -> None:
        self._stub = rpc.InferenceStub(channel)
        self._model = model
        self._metadata = metadata

    async def ask(
        self, token_ids: Sequence[int], *, max_tokens: int, timeout_s: float
    ) -> AsyncGenerator[int | ReportedUsage, None]:
        request = pb.GenerateRequest(
            model=self._model,
            token_ids=pb.TokenIds(ids=token_ids),
            sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        )
        call = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for event in call:
                if event.HasField("delta") and event.delta.token_ids:
                    yield len(event.delta.token_ids)
                elif event.HasField("summary"):
                    usage = event.summary.usage
                    yield ReportedUsage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens)
        except aio.AioRpcError as error:
            raise RequestFailed(f"{error.code().name.lower()}: {error.details()}") from None
        finally:
            call.cancel()


class OpenAIClient:
    """Endpoint over the OpenAI API, /v1/completions."""

    def __init__(self, client: httpx.AsyncClient, endpoints: Sequence[str], *, model: str = "") -> None:
        """endpoints: each request goes to a random one that accepts it."""
        self._model = {"model": model} if model else {}
        self._client = client
        self._endpoints = endpoints

    async def ask(
        self, token_ids: Sequence[int], *, max_tokens: int, timeout_s: float
    ) -> AsyncGenerator[int | ReportedUsage, None]:
        body = {
            **self._model,
            "prompt": list(token_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with aclosing(await self._post(body, timeout_s=timeout_s)) as answer:
                if answer.is_error:
                    raise RequestFailed(f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')}")
                async for line in answer.aiter_lines():
                    for item in _items(_chunk(line)):
                        yield item
        except httpx.HTTPError as error:
            raise RequestFailed(str(error) or type(error).__name__) from None

    async def _post(self, body: dict[str, Any], *, timeout_s: float) -> httpx.Response:
        *others, last = random.sample(self._endpoints, len(self._endpoints))
        for endpoint in others:
            with suppress(*_GONE):
                return await self._send(endpoint, body, timeout_s=timeout_s)
        return await self._send(last, body, timeout_s=timeout_s)

    async def _send(self, endpoint: str, body: dict[str, Any], *, timeout_s: float) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S if len(self._endpoints) > 1 else timeout_s)
        request = self._client.build_request("POST", f"{endpoint}/v1/completions", json=body, timeout=timeout)
        return await self._client.send(request, stream=True)


def _items(chunk: dict[str, Any]) -> Iterator[int | ReportedUsage]:
    for choice in chunk.get("choices", ()):
        if choice.get("token_ids"):
            yield len(choice["token_ids"])
    if usage := chunk.get("usage"):
        details = usage.get("prompt_tokens_details") or {}
        yield ReportedUsage(prompt_tokens=usage["prompt_tokens"], cached_tokens=details.get("cached_tokens") or 0)


def _chunk(line: str) -> dict[str, Any]:
    """Parse one line of a server-sent event stream; empty if it carries no data."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return {}
    chunk: dict[str, Any] = json.loads(data)
    if error := chunk.get("error"):
        raise RequestFailed(str(error.get("message", error)))
    return chunk
