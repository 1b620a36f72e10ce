"""The OpenAI door: /v1/models, /v1/completions and /v1/chat/completions over HTTP, streaming and not."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.words.errors import RequestTooLarge, UnknownModel
from cluster.words.request import Role
from router.doors.event_stream import EventStream, while_connected
from router.doors.openai_answer import OpenAIAnswer
from router.doors.openai_errors import CLIENT_GONE, explain, handle_errors
from router.doors.openai_forms import JSON, ChatForm, Form, TextForm
from router.doors.openai_types import ChatBody, TextBody
from router.metrics import CONTENT_TYPE
from router.text.completion import Completion, Completions
from router.text.completion_request import MAX_REQUEST_BYTES, REQUEST_ID, ModelCard
from router.text.tokenizer import Tokenizer

Body = TypeVar("Body", TextBody, ChatBody)


def create_app(
    completions: Completions,
    *,
    health: Callable[[], Mapping[str, int]],
    metrics: Callable[[], bytes],
    explain_route: Callable[[str], Mapping[str, Any]] | None = None,
    proxy_sets_request_id: bool = False,
    max_body_s: float = 60.0,
) -> FastAPI:
    """The ASGI application. health: usable replicas by role. metrics: Prometheus's text. explain_route: why the
    requests of an id went where they went; empty when that is not known.

    proxy_sets_request_id: what stands in front puts X-Request-Id on answers, as Ray Serve's proxy does; we do not.
    max_body_s: how long a client may take to send its request.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_RequestIds, is_answered=not proxy_sets_request_id)
    handle_errors(app)
    door = _Door(completions, max_body_s)
    app.add_api_route("/v1/models", door.models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", door.model, methods=["GET"])
    app.add_api_route("/v1/completions", door.text, methods=["POST"])
    app.add_api_route("/v1/chat/completions", door.chat, methods=["POST"])

    @app.get("/health")
    async def report_health() -> Response:
        usable = health()
        return JSONResponse(usable, status_code=200 if usable.get(Role.DECODE) else 503)

    @app.get("/metrics")
    async def report_metrics() -> Response:
        return Response(metrics(), headers={"content-type": CONTENT_TYPE})

    @app.get("/debug/routes/{request_id}")
    async def report_route(request_id: str) -> Response:
        found = explain_route(request_id) if explain_route else {}
        return JSONResponse(found, status_code=200 if found else 404)

    return app


class _Door:
    """The endpoints. Every prompt of a body is checked and tokenised before any is dispatched."""

    def __init__(self, completions: Completions, max_body_s: float) -> None:
        self._completions = completions
        self._max_body_s = max_body_s

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [_model(self._completions.model)]})

    async def model(self, model_id: str) -> Response:
        served = self._completions.model
        if model_id != served.id:
            raise UnknownModel(f"model {model_id!r} is not served here; {served.id!r} is", param="model")
        return JSONResponse(_model(served))

    async def text(self, request: Request) -> Response:
        body = _parse(TextBody, await _read(request, within_s=self._max_body_s))
        opened = await self._open(body, request)
        tokenizer = self._completions.tokenizer
        forms = [TextForm(tokenizer, echo=_prompt_text(one, tokenizer) if body.echo else "") for one in opened]
        return await self._answer(request, body, opened, forms)

    async def chat(self, request: Request) -> Response:
        body = _parse(ChatBody, await _read(request, within_s=self._max_body_s))
        opened = await self._open(body, request)
        return await self._answer(request, body, opened, [ChatForm(self._completions.tokenizer)])

    async def _open(self, body: TextBody | ChatBody, request: Request) -> list[Completion]:
        opened = []
        for one in body.requests(request.state.request_id):
            opened.append(await self._completions.open(one))
            await asyncio.sleep(0)  # between a thousand prompts, others have their turn
        return opened

    async def _answer(
        self, request: Request, body: TextBody | ChatBody, opened: list[Completion], forms: Sequence[Form]
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
            return EventStream(answer.chunks())
        whole = await while_connected(request.receive, answer.whole())
        return Response(status_code=CLIENT_GONE) if whole is None else JSONResponse(whole)


class _RequestIds:
    """ASGI middleware: a client's X-Request-Id, or one of ours, on the request and on its answer."""

    def __init__(self, app: ASGIApp, is_answered: bool) -> None:
        self._app = app
        self._is_answered = is_answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_answered:
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _read(request: Request, *, within_s: float) -> bytes:
    """The body, of which no more than MAX_REQUEST_BYTES are ever held.

    Raises RequestTooLarge as soon as that is known, and HTTPException 408 when the body does not arrive in time.
    """
    too_large = RequestTooLarge(f"the body is larger than {MAX_REQUEST_BYTES} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_REQUEST_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for part in request.stream():
                body += part
                if len(body) > MAX_REQUEST_BYTES:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, headers={"connection": "close"}) from None
    return bytes(body)


def _parse(kind: type[Body], body: bytes) -> Body:
    """Raises RequestError that names the first wrong field. The content type is not looked at."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise explain(error) from None


def _prompt_text(completion: Completion, tokenizer: Tokenizer) -> str:
    prompt = completion.request.prompt
    return prompt if isinstance(prompt, str) else tokenizer.decode(completion.prompt_ids, skip_special_tokens=False)


def _model(model: ModelCard) -> JSON:
    """max_model_len is an extension, by vLLM's name."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "cluster",
        "max_model_len": model.max_context,
    }
