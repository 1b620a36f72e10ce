"""HTTP application of a router: all APIs, and the middleware in front of them.

HttpTraces    begins a trace, if the request is sampled
_RequestIds   sets the request id and the error format
_Gate         checks the API key before anything of the request is read
_DirectRoutes calls generation endpoints directly, bypassing the application's routes
Methods       answers HEAD and OPTIONS
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.spec.schema import RouterSpec
from core.types.errors import ClusterError
from frontend.access.access import Access
from frontend.admin.health_api import HealthProbes, add_health
from frontend.anthropic.api import AnthropicApi, AnthropicErrors
from frontend.http.body import BodyReader
from frontend.http.connections import HTTP_ENDPOINT
from frontend.http.errors import ErrorForm, answer_to, error_response, handle_errors
from frontend.http.openapi import OpenapiApi
from frontend.http.request_contexts import Endpoints, HttpRequestContexts
from frontend.openai.api import OpenAIApi
from frontend.openai.errors import OpenAIErrors
from frontend.responses.api import ResponsesApi
from frontend.responses.store import StoreBounds
from frontend.responses.stored import StoredResponses
from frontend.text.completion import Completions
from frontend.text.completion_request import REQUEST_ID
from frontend.text.models import Models
from router.telemetry.tracing import Tracing

_HEALTH = "/health"  # this path and those below it need no API key
_DEFAULT = RouterSpec()


def create_app(
    served: Completions | Models,
    *,
    access: Access,
    is_healthy: Callable[[], bool],
    max_body_s: float = HTTP_ENDPOINT.message_s,
    probes: HealthProbes | None = None,
    spec: RouterSpec = _DEFAULT,
    stored: StoredResponses | None = None,
) -> FastAPI:
    """Create the ASGI application. served: one model, or several. is_healthy: whether requests can be served.

    max_body_s: time limit for receiving a body. probes: functions behind /health/…; None: no such routes.
    spec: settings of the endpoints. stored: stored responses; None: none are.
    """
    models = Models.of(served)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    bodies = BodyReader(
        models.default.threads,
        max_context=lambda: models.max_context,
        within_s=max_body_s,
        rejects_unknown_fields=spec.unknown_fields == "refuse",
    )
    request_contexts = HttpRequestContexts(models, access.limits, bodies, keepalive_s=spec.keepalive_s)
    clamps = spec.max_tokens_beyond_context == "clamp"
    openai = OpenAIApi(models, request_contexts, clamps_max_tokens=clamps)
    anthropic = AnthropicApi(models, request_contexts)
    stored = stored or StoredResponses(None, StoreBounds(max_bytes=0, ttl_s=0))
    responses = ResponsesApi(models, request_contexts, stored)
    answering = {**openai.endpoints, **responses.endpoints, **anthropic.endpoints}
    app.add_middleware(Methods, routes=app.routes)
    app.add_middleware(_DirectRoutes, endpoints=answering)
    app.add_middleware(_Gate, access=access)
    app.add_middleware(_RequestIds, anthropic=frozenset(anthropic.endpoints))  # the last one added runs first
    if tracing := models.default.tracing:
        app.add_middleware(HttpTraces, tracing=tracing, paths=frozenset(answering))
    cors_origins = [origin.strip() for origin in spec.cors_origins.split(",") if origin.strip()]
    if cors_origins:  # outside the gate: a browser's preflight request has no API key
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["GET", "HEAD", "POST", "DELETE"],
                           allow_headers=["*"], expose_headers=["*"])  # fmt: skip
    handle_errors(app)
    OpenapiApi(models).add_to(app)
    openai.add_to(app)
    responses.add_to(app)
    # POST requests are taken by _DirectRoutes; the routes reject other methods and redirect trailing slashes.
    for path, endpoint in answering.items():
        app.add_api_route(path, endpoint, methods=["POST"])

    @app.get(_HEALTH)
    async def report_health() -> Response:
        """Public health check; replica counts are on the admin listener."""
        if is_healthy():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, status_code=503)

    if probes:
        add_health(app, probes)

    return app


class _Gate:
    """ASGI middleware: reject a request without a valid API key before its body is read."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != _HEALTH and not scope["path"].startswith(f"{_HEALTH}/"):
            try:
                headers = Headers(scope=scope)
                client = self._access.identify(headers.get("authorization"), api_key=headers.get("x-api-key"))
            except ClusterError as error:
                await error_response(error, scope["state"]["errors"])(scope, receive, send)
                return
            scope["state"]["client"] = client
        await self._app(scope, receive, send)


class _DirectRoutes:
    """ASGI middleware: call generation endpoints directly. The application's routes would cost as much per request as
    all other work of this process, and several calls per token."""

    def __init__(self, app: ASGIApp, endpoints: Endpoints) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(scope["path"]) if is_post else None
        if endpoint is None:
            return await self._app(scope, receive, send)
        request = Request(scope, receive)
        try:
            answer = await endpoint(request)
            await answer(scope, receive, send)
        except Exception as error:  # boundary, as in a route
            await answer_to(request, error)(scope, receive, send)


class _RequestIds:
    """ASGI middleware: set the request id (the client's X-Request-Id, or a new one) and the error format."""

    def __init__(self, app: ASGIApp, *, anthropic: frozenset[str]) -> None:
        """anthropic: paths that use Anthropic's error format and request id header."""
        self._app = app
        self._anthropic = anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
        is_anthropic = scope["path"] in self._anthropic
        errors: ErrorForm = AnthropicErrors(request_id) if is_anthropic else OpenAIErrors()
        scope.setdefault("state", {}).update(request_id=request_id, errors=errors)

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                add_trace_header(scope["state"], headers, message["status"])
                if is_anthropic:
                    headers["request-id"] = request_id
            return send(message)

        await self._app(scope, receive, send_with_id)


class Methods:
    """Adds HEAD to the routes with GET, as Starlette's own routes have it; the server drops the body.

    Add it first, so that it is the innermost middleware: it looks at each message of a response.
    """

    def __init__(self, app: ASGIApp, *, routes: Sequence[BaseRoute]) -> None:
        """routes: the application's routes; all must be added before the first request."""
        self._app = app
        self._routes = [route for route in routes if isinstance(route, Route) and route.methods]
        for route in self._routes:
            if "GET" in (methods := _methods(route)):
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
        found = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        return ", ".join(sorted({"OPTIONS"}.union(*map(_methods, found)))) if found else ""


def _methods(route: Route) -> set[str]:
    assert route.methods
    return route.methods


class HttpTraces:
    """Traces POST requests to given paths. `add_trace_header` returns the `traceparent` in the response headers."""

    def __init__(self, app: ASGIApp, *, tracing: Tracing, paths: Collection[str]) -> None:
        """paths: traced paths."""
        self._app = app
        self._tracing = tracing
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            return await self._app(scope, receive, send)
        trace = self._tracing.begin(f"POST {scope['path']}", Headers(scope=scope))
        if trace is None:
            return await self._app(scope, receive, send)
        scope.setdefault("state", {})["trace"] = trace
        try:
            await self._app(scope, receive, send)
        finally:
            status = scope["state"].get("status", 0)
            trace.end(status=str(status) if status else "", is_our_fault=status >= 500)


def add_trace_header(state: dict[str, Any], headers: MutableHeaders, status: int) -> None:
    """Add the traceparent to the response headers. Called by the middleware that edits headers anyway: wrapping
    `send` once more would cost per token."""
    if (trace := state.get("trace")) is not None:
        headers["traceparent"] = trace.traceparent
        state["status"] = status
