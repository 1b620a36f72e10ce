"""The HTTP door: the OpenAI API's /v1/models, /v1/completions and /v1/chat/completions, streaming and not; and beside
them what has files of its own: /v1/responses, Anthropic's /v1/messages, and the tokens of texts."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence

from fastapi import FastAPI, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.words.errors import ClusterError, RequestError, UnknownModel
from router.access.access import Access
from router.access.visit import Visit
from router.batches.batches import Batches
from router.doors.anthropic_api import AnthropicDoor
from router.doors.anthropic_errors import AnthropicErrors
from router.doors.batches_api import BatchesApi
from router.doors.body import BodyReader
from router.doors.connections import HTTP_DOOR
from router.doors.error_form import ErrorForm
from router.doors.event_stream import EventStream, whole_answer
from router.doors.files_api import FilesApi
from router.doors.health_api import HealthProbes, add_health
from router.doors.held_streams import HeldStreams
from router.doors.http_visits import HttpVisits
from router.doors.inner_calls import InnerCalls
from router.doors.openai_answer import OpenAIAnswer
from router.doors.openai_errors import OpenAIErrors, answer_to, error_response, handle_errors
from router.doors.openai_forms import JSON, ChatForm, Form, TextForm
from router.doors.openai_types import ChatBody, TextBody
from router.doors.openapi import OpenapiDoor
from router.doors.opened import ID_CHARS, MAX_REPEATED, Asked, Opener
from router.doors.render_api import RenderApi
from router.doors.responses_api import ResponsesApi
from router.doors.streams_api import StreamsApi
from router.doors.tokens_api import add_tokens_api
from router.stored.response_store import StoreBounds
from router.stored.responses import StoredResponses
from router.text.completion import Completion, Completions
from router.text.completion_request import REQUEST_ID, ModelCard

_HEALTH = "/health"  # for this, and what is below it, nobody needs a key
_IN_MEMORY = StoreBounds(max_bytes=64 * 2**20, ttl_s=86_400.0)


def create_app(
    completions: Completions,
    *,
    access: Access,
    is_healthy: Callable[[], bool],
    max_body_s: float = HTTP_DOOR.message_s,
    probes: HealthProbes | None = None,
    refuses_unknown_fields: bool = False,
    cors_origins: Sequence[str] = (),
    stored: StoredResponses | None = None,
    batches: Batches | None = None,
    max_resume_s: float = 60.0,
) -> FastAPI:
    """The ASGI application. is_healthy: whether requests can be served.

    max_body_s: how long a client may take to send its request. probes: what /health/… answers.
    refuses_unknown_fields: else they are ignored, and named in a header. cors_origins: of web pages that may ask.
    stored: responses; None: they are stored in this process alone. batches: None: there are none. max_resume_s: how
    long a streamed answer may be held for a client that has lost it.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    bodies = BodyReader(
        completions.threads,
        max_context=completions.model.max_context,
        within_s=max_body_s,
        refuses_unknown_fields=refuses_unknown_fields,
    )
    visits = HttpVisits(completions, access.limits, bodies)
    door = _Door(completions, visits)
    anthropic = AnthropicDoor(completions, visits)
    responses = ResponsesApi(completions, visits, stored or StoredResponses.in_memory(_IN_MEMORY))
    answering = {
        "/v1/completions": door.text,
        "/v1/chat/completions": door.chat,
        "/v1/responses": responses.create,
        **anthropic.endpoints,
    }
    if batches:
        batched = frozenset(answering) - frozenset(anthropic.endpoints)
        batches.answered_by(InnerCalls(_Straight(app, answering), model=completions.model.id, endpoints=batched))
    app.add_middleware(_Straight, endpoints=answering)
    app.add_middleware(_Gate, access=access)
    streams = HeldStreams(max_resume_s)
    app.add_middleware(_RequestIds, anthropic=frozenset(anthropic.endpoints), streams=streams)  # the last comes first
    if cors_origins:  # a browser asks beforehand, without a key
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["GET", "POST", "DELETE"],
                           allow_headers=["*"], expose_headers=["*"])  # fmt: skip
    handle_errors(app)
    add_tokens_api(app, completions, visits)
    RenderApi(completions, visits).add_to(app)
    OpenapiDoor(completions).add_to(app)
    app.add_api_route("/v1/models", door.models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", door.model, methods=["GET"])
    responses.add_to(app)
    StreamsApi(streams).add_to(app)
    FilesApi(visits, batches).add_to(app)
    BatchesApi(visits, batches).add_to(app)
    # A POST of these never comes so far, see _Straight: the routes refuse other methods, and redirect a slash more.
    for path, endpoint in answering.items():
        app.add_api_route(path, endpoint, methods=["POST"])

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
    """The endpoints."""

    def __init__(self, completions: Completions, visits: HttpVisits) -> None:
        self._completions = completions
        self._visits = visits
        self._opener = Opener(completions, visits)

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [_model(self._completions.model)]})

    async def model(self, model_id: str) -> Response:
        served = self._completions.model
        if model_id != served.id:
            raise UnknownModel(f"model {model_id!r} is not served here; {served.id!r} is", param="model")
        return JSONResponse(_model(served))

    async def text(self, request: Request) -> Response:
        return self._visits.answer(request, self._text)

    async def chat(self, request: Request) -> Response:
        return self._visits.answer(request, self._chat)

    async def _text(self, request: Request, visit: Visit) -> Response:
        asked = await self._opener.read(TextBody, request)
        opened = await self._opener.open(asked, request, visit)
        with self._visits.noted(request):
            forms = await self._text_forms(asked.body, opened)
        return await self._answer(request, asked, opened, forms, headers=await visit.charge(opened))

    async def _chat(self, request: Request, visit: Visit) -> Response:
        asked = await self._opener.read(ChatBody, request)
        opened = await self._opener.open(asked, request, visit)
        if asked.body.stream:  # else the answer has the prompt once
            with self._visits.noted(request):
                _check_repeated(asked.body, opened, 0)
        forms = [ChatForm(self._completions.tokenizer)]
        return await self._answer(request, asked, opened, forms, headers=await visit.charge(opened))

    async def _text_forms(self, body: TextBody | ChatBody, opened: Sequence[Completion]) -> list[Form]:
        forms, num_echoed, tokenizer = list[Form](), 0, self._completions.tokenizer
        has_echo = isinstance(body, TextBody) and body.echo
        num_echo_logprobs = body.logprobs if isinstance(body, TextBody) and body.echo else None
        has_answer = not (isinstance(body, TextBody) and body.is_prompt_all)
        for one in opened:
            echo = await one.prompt_text() if has_echo else ""
            num_echoed += len(echo) * one.n
            _check_repeated(body, opened, num_echoed)
            forms.append(TextForm(tokenizer, echo=echo, num_echo_logprobs=num_echo_logprobs, has_answer=has_answer))
        return forms

    async def _answer(
        self,
        request: Request,
        asked: Asked[TextBody] | Asked[ChatBody],
        opened: list[Completion],
        forms: Sequence[Form],
        *,
        headers: Mapping[str, str],
    ) -> Response:
        body = asked.body
        answer = OpenAIAnswer(
            id=forms[0].id_prefix + request.state.request_id,
            model=self._completions.model.id,
            completions=opened,
            forms=forms,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            return_token_ids=bool(body.return_token_ids),
            num_prompt_logprobs=body.prompt_logprobs,
            tokenizer=self._completions.tokenizer,
            threads=self._completions.threads,
        )
        if asked.ignored:
            headers = {**headers, **asked.ignored}
        if body.stream:
            return EventStream(answer.chunks(), more_headers=headers, errors=request.state.errors)
        return await whole_answer(request.receive, answer.whole(), headers)


class _Gate:
    """ASGI middleware: who may not ask is told so before anything of its request is read."""

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
            scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)


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
    """ASGI middleware: a client's X-Request-Id, or one of ours, on the request and on its answer. And the form in which
    it hears of errors, and the streams that are held, on the request."""

    def __init__(self, app: ASGIApp, *, anthropic: frozenset[str], streams: HeldStreams) -> None:
        """anthropic: paths whose clients have Anthropic's form, and its name of that header."""
        self._app = app
        self._streams = streams
        self._anthropic = anthropic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        is_anthropic = scope["path"] in self._anthropic
        errors: ErrorForm = AnthropicErrors(request_id) if is_anthropic else OpenAIErrors()
        scope.setdefault("state", {}).update(request_id=request_id, errors=errors, streams=self._streams)

        def send_with_id(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic:
                    headers["request-id"] = request_id
            return send(message)

        await self._app(scope, receive, send_with_id)


def _check_repeated(body: TextBody | ChatBody, opened: Sequence[Completion], num_echoed: int) -> None:
    """What an answer repeats of its prompts, for each choice. Raises RequestError."""
    num = num_echoed + (ID_CHARS * sum(one.n * len(one.prompt_ids) for one in opened) if body.return_token_ids else 0)
    if num > MAX_REPEATED:
        param = "echo" if num_echoed else "return_token_ids"
        text = f"{param}: prompts times n are too much for an answer to repeat; leave it out, or ask for fewer choices"
        raise RequestError(text, param=param)


def _model(model: ModelCard) -> JSON:
    """max_model_len is an extension, by vLLM's name."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "cluster",
        "max_model_len": model.max_context,
    }
