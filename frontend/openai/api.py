"""OpenAI API: /v1/models, /v1/completions and /v1/chat/completions, whole and streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from core.types.errors import RequestError
from frontend.access.limits import RequestContext
from frontend.http.event_stream import JSON, whole_answer
from frontend.http.request_contexts import ID_CHARS, MAX_REPEATED, Endpoints, HttpRequestContexts, Opener, ParsedBody
from frontend.openai.answer import OpenAIAnswer
from frontend.openai.fields import also_ignored
from frontend.openai.forms import ChatForm, Form, TextForm
from frontend.openai.types import ChatBody, StreamOptions, TextBody
from frontend.text.completion import Completion, Models
from frontend.text.completion_request import ModelCard


class OpenAIApi:
    """Endpoints of the OpenAI API for models, completions and chats."""

    def __init__(
        self, models: Models, request_contexts: HttpRequestContexts, *, clamps_max_tokens: bool = False
    ) -> None:
        """clamps_max_tokens: as in Opener."""
        self._models = models
        self._request_contexts = request_contexts
        self._opener = Opener(models, request_contexts, clamps_max_tokens=clamps_max_tokens)

    @property
    def endpoints(self) -> Endpoints:
        """Generation endpoints, by path."""
        return {
            "/v1/completions": self._request_contexts.route(self._text),
            "/v1/chat/completions": self._request_contexts.route(self._chat),
        }

    def add_to(self, app: FastAPI) -> None:
        """Add the other endpoints."""
        app.add_api_route("/v1/models", self.models, methods=["GET"])
        app.add_api_route("/v1/models/{model_id:path}", self.model, methods=["GET"])

    async def models(self) -> Response:
        listed = [_model(card, name) for card in self._models.cards for name in card.names]
        return JSONResponse({"object": "list", "data": listed})

    async def model(self, model_id: str) -> Response:
        if not model_id:  # the list's path with a slash behind it
            return await self.models()
        return JSONResponse(_model(self._models.card(model_id), model_id))

    async def _text(self, request: Request, request_context: RequestContext) -> Response:
        parsed = await self._opener.read(TextBody, request)
        opened = await self._opener.open(parsed, request, request_context)
        with self._request_contexts.audited(request):
            forms = await self._text_forms(parsed.body, opened)
        return await self._answer(request, parsed, opened, forms, headers=await request_context.charge(opened))

    async def _chat(self, request: Request, request_context: RequestContext) -> Response:
        parsed = await self._opener.read(ChatBody, request)
        opened = await self._opener.open(parsed, request, request_context)
        if parsed.body.stream:  # a whole response has the prompt only once
            with self._request_contexts.audited(request):
                _check_repeated(parsed.body, opened, 0)
        forms = [ChatForm(opened[0].service.tokenizer, hides_thinking=parsed.body.hides_thinking)]
        return await self._answer(request, parsed, opened, forms, headers=await request_context.charge(opened))

    async def _text_forms(self, body: TextBody | ChatBody, opened: Sequence[Completion]) -> list[Form]:
        forms, num_echoed, tokenizer = list[Form](), 0, opened[0].service.tokenizer
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
        parsed: ParsedBody[TextBody] | ParsedBody[ChatBody],
        opened: list[Completion],
        forms: Sequence[Form],
        *,
        headers: Mapping[str, str],
    ) -> Response:
        body, service = parsed.body, opened[0].service
        streamed = body.stream_options or StreamOptions()
        answer = OpenAIAnswer(
            id=forms[0].id_prefix + request.state.request_id,
            model=opened[0].model_name,
            completions=opened,
            forms=forms,
            include_usage=bool(streamed.include_usage),
            has_running_usage=bool(streamed.include_usage and streamed.continuous_usage_stats),
            return_token_ids=bool(body.return_token_ids),
            num_prompt_logprobs=body.prompt_logprobs,
            tokenizer=service.tokenizer,
            threads=service.threads,
        )
        headers = {**headers, **also_ignored(parsed.ignored, [name for one in opened for name in one.ignored])}
        if body.stream:
            return self._request_contexts.stream(request, answer.chunks(), headers)
        return await whole_answer(request.receive, answer.whole(), headers)


def _check_repeated(body: TextBody | ChatBody, opened: Sequence[Completion], num_echoed: int) -> None:
    """Limit the prompt text and ids repeated for each choice. Raises RequestError."""
    num = num_echoed + (ID_CHARS * sum(one.n * len(one.prompt_ids) for one in opened) if body.return_token_ids else 0)
    if num > MAX_REPEATED:
        param = "echo" if num_echoed else "return_token_ids"
        text = f"{param}: prompts times n are too large to repeat in the response; omit it, or request fewer choices"
        raise RequestError(text, param=param)


def _model(model: ModelCard, name: str) -> JSON:
    """Return OpenAI's model object under one of the model's names, with extensions."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "cluster",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
        "default_sampling_params": dict(model.sampling_defaults),
    }
