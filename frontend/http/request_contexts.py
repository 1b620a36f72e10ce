"""Generation requests over HTTP: hold the key's slot and tokens, read and check the body, tokenize the prompts; common
to all APIs. Rejections are recorded in the audit log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.types.errors import ClusterError
from frontend.access.access import Client
from frontend.access.limits import Limits, RequestContext
from frontend.http.body import Body, BodyReader, T
from frontend.http.event_stream import EventStream
from frontend.openai.fields import OpenAIObject, ignored_header
from frontend.text.completion import Completion, Models
from frontend.text.completion_request import CompletionRequest, check_prompt_numbers, check_total
from frontend.text.prompt_encoder import num_chars

Endpoint: TypeAlias = Callable[[Request, RequestContext], Awaitable[Response]]
Endpoints: TypeAlias = Mapping[str, Callable[[Request], Awaitable[Response]]]  # by path, all by POST
MAX_REPEATED = 2**23  # characters of prompts repeated in one response
ID_CHARS = 8  # characters that a token id counts as


@dataclass(frozen=True)
class HttpRequestContexts:
    """Holds an API key's concurrency slot and tokens while a request is answered; one object per router."""

    models: Models
    limits: Limits
    bodies: BodyReader
    keepalive_s: float  # silence of a stream after which it sends a keep-alive

    def route(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return a route function that runs `endpoint` within a request context."""

        async def answer(request: Request) -> Response:
            return self.answer(request, endpoint)

        return answer

    def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """Return a response that runs `endpoint` while the key's slot and tokens are held."""
        return _ContextResponse(self, request, endpoint)

    def stream(self, request: Request, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> Response:
        """Return a stream of events in the request's API."""
        return EventStream(events, more_headers=headers, errors=request.state.errors, keepalive_s=self.keepalive_s)

    async def read(self, kind: type[Body], request: Request, make: Callable[[Body], T]) -> T:
        """Read the body as BodyReader.read does, and record a rejection in the audit log."""
        with self.audited(request):
            return await self.bodies.read(kind, request, make, key_id=client_of(request).key_id)

    @contextmanager
    def audited(self, request: Request) -> Iterator[None]:
        """Record a ClusterError of the block in the audit log, and re-raise it."""
        try:
            yield
        except ClusterError as error:
            key = client_of(request).key
            self.models.default.unreadable(request.state.request_id, error, key=key, peer=peer_of(request))
            raise


def client_of(request: Request) -> Client:
    client: Client = request.state.client
    return client


def tenant_of(request: Request) -> str:
    return client_of(request).tenant


def peer_of(request: Request) -> str:
    """Return the client's address, for the audit log; empty if the server does not know it."""
    return f"{request.client.host}:{request.client.port}" if request.client else ""


class _ContextResponse(Response):
    """Response that is created and sent while a key's slot and tokens are held, from before the body is read."""

    def __init__(self, request_contexts: HttpRequestContexts, request: Request, endpoint: Endpoint) -> None:
        super().__init__()
        self._request_contexts = request_contexts
        self._request = request
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            with self._request_contexts.audited(self._request):
                reservation = self._request_contexts.limits.entered(client_of(self._request).key)
                request_context = await stack.enter_async_context(reservation)
            answer = await self._endpoint(self._request, request_context)
            await answer(scope, receive, send)


class GenerationBody(OpenAIObject):
    """Body of a generation request."""

    def requests(self, request_id: str, *, peer: str = "") -> list[CompletionRequest]:
        """Return at least one request. Raises RequestError."""
        raise NotImplementedError


B = TypeVar("B", bound=GenerationBody)


@dataclass(frozen=True)
class ParsedBody(Generic[B]):
    """Parsed body, with all values that need a pass over the whole body."""

    body: B
    requests: Sequence[CompletionRequest]  # num_chars has been computed
    ignored: Mapping[str, str]  # headers that list ignored fields

    @classmethod
    def of(cls, request: Request, body: B) -> ParsedBody[B]:
        """Build the requests of a body. Raises RequestError."""
        requests = body.requests(request.state.request_id, peer=peer_of(request))
        for one in requests:
            num_chars(one.prompt)  # a chat caches it
        return cls(body, requests, ignored_header(body))


@dataclass(frozen=True)
class Opener:
    """Opens completions. Every prompt of a body is checked and tokenized before any is dispatched."""

    models: Models
    request_contexts: HttpRequestContexts
    clamps_max_tokens: bool = False  # treat max_tokens as an upper bound, whatever the API

    async def read(self, kind: type[B], request: Request) -> ParsedBody[B]:
        """Read the body. Raises what BodyReader.read raises."""
        return await self.request_contexts.read(kind, request, partial(ParsedBody.of, request))

    async def open(self, parsed: ParsedBody[B], request: Request, request_context: RequestContext) -> list[Completion]:
        """Return one completion for each request, not charged yet. Raises RequestError and other ClusterErrors."""
        opened = list[Completion]()
        with self.request_contexts.audited(request):
            served = self.models.find(parsed.requests[0].model)
            requests = parsed.requests
            if self.clamps_max_tokens:
                requests = [replace(one, clamps_max_tokens=True) for one in requests]
            requests = [client_of(request).bound(one) for one in requests]
            request_context.check(sum(served.prompts.least_tokens(one) for one in requests))
        total_chars = sum(num_chars(one.prompt) for one in requests)
        for one in requests:
            num_other_chars = total_chars - num_chars(one.prompt)
            opened.append(await served.open(one, num_other_chars=num_other_chars, trace=request.state.trace))
            num_answers = sum(completion.max_answer_tokens for completion in opened)
            check_total(num_answers, served.model, param=one.max_tokens_field)
            num_logprobs = sum(completion.n * completion.num_prompt_numbers for completion in opened)
            check_prompt_numbers(num_logprobs, param=one.prompt_logprobs_field)
            await asyncio.sleep(0)  # a body may have a thousand prompts: let other tasks run
        return opened
