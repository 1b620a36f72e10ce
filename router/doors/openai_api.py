"""The OpenAI door: /v1/models, /v1/completions and /v1/chat/completions over HTTP, streaming and not."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.words.errors import ClusterError, UnknownModel
from router.access.access import Access
from router.access.client import Client
from router.access.limits import Limits
from router.access.visit import Visit
from router.doors.body import Body, BodyReader
from router.doors.connections import HTTP_DOOR
from router.doors.event_stream import EventStream, to_json, while_connected
from router.doors.health_api import HealthProbes, add_health
from router.doors.openai_answer import OpenAIAnswer
from router.doors.openai_errors import CLIENT_GONE, answer_to, error_response, handle_errors
from router.doors.openai_forms import JSON, ChatForm, Form, TextForm
from router.doors.openai_types import ChatBody, TextBody
from router.text.completion import Completion, Completions, num_chars
from router.text.completion_request import REQUEST_ID, ModelCard, check_total
from router.text.tokenizer import Tokenizer

_HEALTH = "/health"  # for this, and what is below it, nobody needs a key


def create_app(
    completions: Completions,
    *,
    access: Access,
    is_healthy: Callable[[], bool],
    max_body_s: float = HTTP_DOOR.message_s,
    probes: HealthProbes | None = None,
) -> FastAPI:
    """The ASGI application. is_healthy: whether requests can be served.

    max_body_s: how long a client may take to send its request. probes: what /health/… answers.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    door = _Door(completions, access.limits, max_body_s)
    app.add_middleware(_Straight, endpoints={"/v1/completions": door.text, "/v1/chat/completions": door.chat})
    app.add_middleware(_Gate, access=access)
    app.add_middleware(_RequestIds)  # the one added last comes first
    handle_errors(app)
    app.add_api_route("/v1/models", door.models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", door.model, methods=["GET"])
    app.add_api_route("/v1/completions", door.text, methods=["POST"])
    app.add_api_route("/v1/chat/completions", door.chat, methods=["POST"])

    @app.get(_HEALTH)
    async def report_health() -> Response:
        """Only that: how many there are of what is on the admin listener."""
        if is_healthy():
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable"}, status_code=503)

    if probes:
        add_health(app, probes)

    return app


class _Door:
    """The endpoints. Every prompt of a body is checked and tokenised before any is dispatched."""

    def __init__(self, completions: Completions, limits: Limits, max_body_s: float) -> None:
        self._completions = completions
        self._limits = limits
        self._bodies = BodyReader(completions.threads, max_context=completions.model.max_context, within_s=max_body_s)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [_model(self._completions.model)]})

    async def model(self, model_id: str) -> Response:
        served = self._completions.model
        if model_id != served.id:
            raise UnknownModel(f"model {model_id!r} is not served here; {served.id!r} is", param="model")
        return JSONResponse(_model(served))

    async def text(self, request: Request) -> Response:
        return _DuringVisit(self._entered(request), partial(self._text, request))

    async def chat(self, request: Request) -> Response:
        return _DuringVisit(self._entered(request), partial(self._chat, request))

    async def _text(self, request: Request, visit: Visit) -> Response:
        body = await self._read(TextBody, request)
        opened = await self._open(body, request, visit)
        tokenizer = self._completions.tokenizer
        forms = [TextForm(tokenizer, echo=_prompt_text(one, tokenizer) if body.echo else "") for one in opened]
        return await self._answer(request, body, opened, forms, headers=await visit.charge(opened))

    async def _chat(self, request: Request, visit: Visit) -> Response:
        body = await self._read(ChatBody, request)
        opened = await self._open(body, request, visit)
        forms = [ChatForm(self._completions.tokenizer)]
        return await self._answer(request, body, opened, forms, headers=await visit.charge(opened))

    @asynccontextmanager
    async def _entered(self, request: Request) -> AsyncIterator[Visit]:
        async with AsyncExitStack() as stack:
            with self._noted(request):
                visit = await stack.enter_async_context(self._limits.entered(_client(request)))
            yield visit

    async def _read(self, kind: type[Body], request: Request) -> Body:
        key = _client(request).key
        with self._noted(request):
            return await self._bodies.read(kind, request, key_id=key.id if key else "")

    @contextmanager
    def _noted(self, request: Request) -> Iterator[None]:
        """What is refused inside is in the trail."""
        try:
            yield
        except ClusterError as error:
            key = _client(request).key
            self._completions.unreadable(request.state.request_id, error, key=key, peer=_peer(request))
            raise

    async def _open(self, body: TextBody | ChatBody, request: Request, visit: Visit) -> list[Completion]:
        opened, model = list[Completion](), self._completions.model
        with self._noted(request):
            asked = body.requests(request.state.request_id, peer=_peer(request))
            asked = [_client(request).bound(one) for one in asked]
            visit.check(sum(self._completions.least_tokens(one) for one in asked))
        num_all = sum(num_chars(one.prompt) for one in asked)
        for one in asked:
            opened.append(await self._completions.open(one, num_beside=num_all - num_chars(one.prompt)))
            check_total(sum(completion.max_answer_tokens for completion in opened), model)
            await asyncio.sleep(0)  # between a thousand prompts, others have their turn
        return opened

    async def _answer(
        self,
        request: Request,
        body: TextBody | ChatBody,
        opened: list[Completion],
        forms: Sequence[Form],
        *,
        headers: Mapping[str, str],
    ) -> Response:
        answer = OpenAIAnswer(
            id=forms[0].id_prefix + request.state.request_id,
            model=self._completions.model.id,
            completions=opened,
            forms=forms,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            return_token_ids=bool(body.return_token_ids),
        )
        if body.stream:
            return EventStream(answer.chunks(), more_headers=headers)
        whole = await while_connected(request.receive, answer.whole())
        if whole is None:
            return Response(status_code=CLIENT_GONE)
        return Response(to_json(whole), media_type="application/json", headers=dict(headers))


class _DuringVisit(Response):
    """An answer that is made, and sent, while a key's place is held: from before the body is read, to whatever end."""

    def __init__(
        self, entered: AbstractAsyncContextManager[Visit], make: Callable[[Visit], Awaitable[Response]]
    ) -> None:
        super().__init__()
        self._entered = entered
        self._make = make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._entered as visit:
            answer = await self._make(visit)
            await answer(scope, receive, send)


class _Gate:
    """ASGI middleware: who may not ask is told so before anything of its request is read."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != _HEALTH and not scope["path"].startswith(f"{_HEALTH}/"):
            try:
                client = self._access.identify(Headers(scope=scope).get("authorization"))
            except ClusterError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)


def _client(request: Request) -> Client:
    client: Client = request.state.client
    return client


class _Straight:
    """ASGI middleware: what brings answers goes to its endpoint at once. On their way through an application's routes a
    request costs as much as everything else that this process does for it, and each token several calls."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, Callable[[Request], Awaitable[Response]]]) -> None:
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
        except Exception as error:  # an edge, as in a route
            await answer_to(request, error)(scope, receive, send)


class _RequestIds:
    """ASGI middleware: a client's X-Request-Id, or one of ours, on the request and on its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            return send(message)

        await self._app(scope, receive, send_with_id)


def _prompt_text(completion: Completion, tokenizer: Tokenizer) -> str:
    prompt = completion.request.prompt
    return prompt if isinstance(prompt, str) else tokenizer.decode(completion.prompt_ids, skip_special_tokens=False)


def _peer(request: Request) -> str:
    """Who has asked, for the log; empty where the server does not say."""
    return f"{request.client.host}:{request.client.port}" if request.client else ""


def _model(model: ModelCard) -> JSON:
    """max_model_len is an extension, by vLLM's name."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "cluster",
        "max_model_len": model.max_context,
    }
