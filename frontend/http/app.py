"""HTTP application of a router: all APIs, and the middleware in front of them."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.spec.schema import RouterSpec
from core.types.errors import ClusterError
from frontend.access.access import Access
from frontend.anthropic.api import AnthropicApi, AnthropicErrors
from frontend.http.body import BodyReader
from frontend.http.connections import HTTP_ENDPOINT
from frontend.http.event_stream import ErrorForm, answer_to, error_response, handle_errors
from frontend.http.openapi import OpenapiApi
from frontend.http.request_contexts import Endpoints, HttpRequestContexts
from frontend.openai.api import OpenAIApi
from frontend.openai.errors import OpenAIErrors
from frontend.responses.api import ResponsesApi
from frontend.responses.store import StoreBounds
from frontend.responses.stored import StoredResponses
from frontend.text.completion import Completions, Models
from frontend.text.completion_request import REQUEST_ID
from router.telemetry.tracing import Tracing

_HEALTH = "/health"  # this path and those below it need no API key
_DEFAULT = RouterSpec()


def create_app(
    served: Completions | Models,
    *,
    access: Access,
    is_healthy: Callable[[], bool],
    max_body_s: float = HTTP_ENDPOINT.message_s,
    probes: Mapping[str, Callable[[], bool]] = {},
    spec: RouterSpec = _DEFAULT,
    stored: StoredResponses | None = None,
) -> FastAPI:
    """Create the ASGI application. served: one model, or several. is_healthy: whether requests can be served.

    max_body_s: time limit for receiving a body. probes: functions behind /health/NAME, which answer from memory. False
    means, for `live`: restart the process; `ready`: send no requests now; `startup`: ignore the other two. spec:
    endpoint settings. stored: None: store nothing.
    """
    models = Models.of(served)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    rejects_unknown = spec.unknown_fields == "refuse"
    bodies = BodyReader(models.default.threads, lambda: models.max_context, max_body_s, rejects_unknown)
    request_contexts = HttpRequestContexts(models, access.limits, bodies, keepalive_s=spec.keepalive_s)
    clamps = spec.max_tokens_beyond_context == "clamp"
    openai = OpenAIApi(models, request_contexts, clamps_max_tokens=clamps)
    anthropic = AnthropicApi(models, request_contexts)
    stored = stored or StoredResponses(None, StoreBounds(max_bytes=0, ttl_s=0))
    responses = ResponsesApi(models, request_contexts, stored)
    answering = {**openai.endpoints, **responses.endpoints, **anthropic.endpoints}
    app.add_middleware(Methods, routes=app.routes)
    app.add_middleware(_DirectRoutes, endpoints=answering)
    app.add_middleware(  # the last one added runs first
        _Entrance,
        access=access,
        tracing=models.default.tracing,
        traced=frozenset(answering),
        anthropic=frozenset(anthropic.endpoints),
    )
    cors_origins = [origin.strip() for origin in spec.cors_origins.split(",") if origin.strip()]
    if cors_origins:  # outside the entrance: a browser's preflight request has no API key
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["GET", "HEAD", "POST", "DELETE"],
                           allow_headers=["*"], expose_headers=["*"])  # fmt: skip
    handle_errors(app)
    OpenapiApi(models).add_to(app)
    openai.add_to(app)
    responses.add_to(app)
    # POST requests are taken by _DirectRoutes; the routes reject other methods and redirect trailing slashes.
    for path, endpoint in answering.items():
        app.add_api_route(path, endpoint, methods=["POST"])
    # Public: replica counts are on the admin listener.
    app.add_api_route(_HEALTH, _health(is_healthy), methods=["GET"])
    for name, probe in probes.items():
        app.add_api_route(f"{_HEALTH}/{name}", _health(probe), methods=["GET"])
    return app


def _health(probe: Callable[[], bool]) -> Callable[[], Awaitable[Response]]:
    """Return a route function that answers 200 or 503, without a reason."""

    async def report() -> Response:
        if probe():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, status_code=503)

    return report


@dataclass(frozen=True)
class _Entrance:
    """ASGI middleware: begin the trace of a sampled request, set its id (the client's X-Request-Id, or a new one) and
    its error format, and reject it without a valid API key before its body is read.

    Adds all headers in one place: each further wrapper of `send` would cost per token.
    """

    app: ASGIApp
    access: Access
    tracing: Tracing | None
    traced: Collection[str]  # paths
    anthropic: Collection[str]  # paths that use Anthropic's error format and request id header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        received, path = Headers(scope=scope), scope["path"]
        client_id = received.get("x-request-id", "")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
        is_anthropic = path in self.anthropic
        errors: ErrorForm = AnthropicErrors(request_id) if is_anthropic else OpenAIErrors()
        is_traced = scope["method"] == "POST" and path in self.traced
        trace = self.tracing.begin(f"POST {path}", received) if self.tracing and is_traced else None
        scope.setdefault("state", {}).update(request_id=request_id, errors=errors, trace=trace)
        added = {"x-request-id": request_id}
        if trace:
            added["traceparent"] = trace.traceparent
        if is_anthropic:
            added["request-id"] = request_id
        status = 0

        def send_with_id(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(added)
            return send(message)

        try:
            await (self._rejected(scope, received, errors) or self.app)(scope, receive, send_with_id)
        finally:
            if trace:
                trace.end(status=str(status) if status else "", is_our_fault=status >= 500)

    def _rejected(self, scope: Scope, received: Headers, errors: ErrorForm) -> Response | None:
        """Set the client of the request, or return the response that rejects it."""
        if scope["path"] == _HEALTH or scope["path"].startswith(f"{_HEALTH}/"):
            return None
        try:
            authorization, api_key = received.get("authorization"), received.get("x-api-key")
            scope["state"]["client"] = self.access.identify(authorization, api_key=api_key)
        except ClusterError as error:
            return error_response(error, errors)
        return None


@dataclass(frozen=True)
class _DirectRoutes:
    """ASGI middleware: call generation endpoints directly. The application's routes would cost as much per request as
    all other work of this process, and several calls per token."""

    app: ASGIApp
    endpoints: Endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self.endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        try:
            answer = await endpoint(request)
            await answer(scope, receive, send)
        except Exception as error:  # boundary, as in a route
            await answer_to(request, error)(scope, receive, send)


class Methods:
    """Adds HEAD to the routes with GET, as Starlette's own routes have it; the server drops the body.

    Add it first, so that it is the innermost middleware: it looks at each message of a response.
    """

    def __init__(self, app: ASGIApp, *, routes: Sequence[BaseRoute]) -> None:
        """routes: the application's routes; all must be added before the first request."""
        self._app = app
        self._routes = [(one, one.methods) for one in routes if isinstance(one, Route) and one.methods]
        for _, methods in self._routes:
            if "GET" in methods:
                methods.add("HEAD")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] == "OPTIONS" and (allowed := self._allowed(scope)):
            return await Response(status_code=204, headers={"allow": allowed})(scope, receive, send)

        def send_allowed(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start" and message["status"] == 405:
                MutableHeaders(scope=message)["allow"] = self._allowed(scope)
            return send(message)

        await self._app(scope, receive, send_allowed)

    def _allowed(self, scope: Scope) -> str:
        """Return the methods of all routes with this path; empty if there is none."""
        found = [methods for route, methods in self._routes if route.matches(scope)[0] is not Match.NONE]
        return ", ".join(sorted({"OPTIONS"}.union(*found))) if found else ""
