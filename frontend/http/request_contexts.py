"""Request contexts over HTTP: hold the key's reservation during a request, and record rejections."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import TypeAlias

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.types.errors import ClusterError
from frontend.access.identity import Client
from frontend.access.limits import Limits
from frontend.access.request_context import RequestContext
from frontend.http.body import Body, BodyReader, T
from frontend.http.event_stream import EventStream
from frontend.text.models import Models

Endpoint: TypeAlias = Callable[[Request, RequestContext], Awaitable[Response]]
Endpoints: TypeAlias = Mapping[str, Callable[[Request], Awaitable[Response]]]  # by path, all by POST


class HttpRequestContexts:
    """Holds a key's reservation while a request is answered; one for the HTTP endpoint of a router."""

    def __init__(self, models: Models, limits: Limits, bodies: BodyReader, *, keepalive_s: float) -> None:
        """keepalive_s: silence of a stream after which it sends a keep-alive."""
        self._keepalive_s = keepalive_s
        self._models = models
        self._limits = limits
        self._bodies = bodies

    def route(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return a route function that runs `endpoint` within a request context."""

        async def answer(request: Request) -> Response:
            return self.answer(request, endpoint)

        return answer

    def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """Return a response that runs `endpoint` while the key's reservation is held."""
        return _ContextResponse(self._entered(request), partial(endpoint, request))

    def stream(self, request: Request, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> Response:
        """Return a stream of events in the request's API."""
        return EventStream(events, more_headers=headers, errors=request.state.errors, keepalive_s=self._keepalive_s)

    @asynccontextmanager
    async def _entered(self, request: Request) -> AsyncIterator[RequestContext]:
        async with AsyncExitStack() as stack:
            with self.audited(request):
                request_context = await stack.enter_async_context(self._limits.entered(client_of(request)))
            yield request_context

    async def read(self, kind: type[Body], request: Request, make: Callable[[Body], T]) -> T:
        """Read the body as BodyReader.read does, and record a rejection in the audit log."""
        with self.audited(request):
            return await self._bodies.read(kind, request, make, key_id=client_of(request).key_id)

    @contextmanager
    def audited(self, request: Request) -> Iterator[None]:
        """Record a ClusterError of the block in the audit log, and re-raise it."""
        try:
            yield
        except ClusterError as error:
            key = client_of(request).key
            self._models.default.unreadable(request.state.request_id, error, key=key, peer=peer_of(request))
            raise


def client_of(request: Request) -> Client:
    client: Client = request.state.client
    return client


def tenant_of(request: Request) -> str:
    """Return the client's tenant; empty without a key."""
    return client_of(request).tenant


def peer_of(request: Request) -> str:
    """Return the client's address, for the audit log; empty if the server does not know it."""
    return f"{request.client.host}:{request.client.port}" if request.client else ""


class _ContextResponse(Response):
    """Response that is created and sent while a key's reservation is held, from before the body is read."""

    def __init__(
        self,
        entered: AbstractAsyncContextManager[RequestContext],
        make: Callable[[RequestContext], Awaitable[Response]],
    ) -> None:
        super().__init__()
        self._entered = entered
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._entered as request_context:
            answer = await self._make(request_context)
            await answer(scope, receive, send)
