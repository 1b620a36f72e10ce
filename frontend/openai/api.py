"""OpenAI API: /v1/models, /v1/completions and /v1/chat/completions, whole and streamed. As in vLLM, without generation:
POST /tokenize, /detokenize, /v1/completions/render and /v1/chat/completions/render, and GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from core.types.errors import RequestError
from frontend.access.limits import RequestContext
from frontend.http.event_stream import JSON, json_answer, whole_answer
from frontend.http.request_contexts import ID_CHARS, MAX_REPEATED, Endpoints, HttpRequestContexts, Opener, client_of
from frontend.openai.answer import OpenAIAnswer
from frontend.openai.fields import also_ignored
from frontend.openai.forms import ChatForm, Form, TextForm
from frontend.openai.types import ChatBody, DetokenizeBody, TextBody, TokenizeBody
from frontend.text.completion import Completion, Models
from frontend.text.completion_request import ModelCard

PACKAGE = "xpyd"


class OpenAIApi:
    """Endpoints of the OpenAI API for models, completions, chats and tokens."""

    def __init__(self, models: Models, request_contexts: HttpRequestContexts, *, clamps_max_tokens: bool) -> None:
        """clamps_max_tokens: as in Opener."""
        self._models = models
        self._request_contexts = request_contexts
        self._opener = Opener(models, request_contexts, clamps_max_tokens=clamps_max_tokens)

    @property
    def endpoints(self) -> Endpoints:
        """Generation endpoints, by path."""
        return {
            "/v1/completions": self._request_contexts.route(partial(self._answer, TextBody)),
            "/v1/chat/completions": self._request_contexts.route(partial(self._answer, ChatBody)),
        }

    def add_to(self, app: FastAPI) -> None:
        for path, look in (
            ("/v1/models", self.models),
            ("/v1/models/{model_id:path}", self.model),
            ("/tokenizer_info", self.tokenizer_info),
            ("/version", self.version),
        ):
            app.add_api_route(path, look, methods=["GET"])
        for path, endpoint in (
            ("/tokenize", self._tokenize),
            ("/detokenize", self._detokenize),
            ("/v1/completions/render", partial(self._render, TextBody)),
            ("/v1/chat/completions/render", partial(self._render, ChatBody)),
        ):
            app.add_api_route(path, self._request_contexts.route(endpoint), methods=["POST"])

    async def models(self) -> Response:
        listed = [_model(card, name) for card in self._models.cards for name in card.names]
        return JSONResponse({"object": "list", "data": listed})

    async def model(self, model_id: str) -> Response:
        if not model_id:  # the list's path with a slash behind it
            return await self.models()
        return JSONResponse(_model(self._models.card(model_id), model_id))

    async def _answer(
        self, kind: type[TextBody] | type[ChatBody], request: Request, request_context: RequestContext
    ) -> Response:
        parsed = await self._opener.read(kind, request)
        opened = await self._opener.open(parsed, request, request_context)
        with self._request_contexts.audited(request):
            forms = await _forms(parsed.body, opened)
        ignored = also_ignored(parsed.ignored, [name for one in opened for name in one.ignored])
        headers = {**await request_context.charge(opened), **ignored}
        answer = OpenAIAnswer(forms[0].id_prefix + request.state.request_id, parsed.body, opened, forms)
        if parsed.body.stream:
            return self._request_contexts.stream(request, answer.chunks(), headers)
        return await whole_answer(request.receive, answer.whole(), headers)

    async def tokenizer_info(self, model: str = "") -> Response:
        """Return the special tokens and the chat template, so that lm-eval needs no tokenizer of its own."""
        prompts = self._models.find(model).prompts
        tokens = {**dict.fromkeys(("bos_token", "eos_token", "pad_token")), **prompts.tokenizer.special_tokens}
        return JSONResponse({**tokens, "chat_template": prompts.chat_template.source or None})

    async def version(self) -> Response:
        return JSONResponse({"version": version(PACKAGE)})

    async def _tokenize(self, request: Request, request_context: RequestContext) -> Response:
        parsed = await self._opener.read(TokenizeBody, request)
        (asked,) = parsed.requests
        with self._request_contexts.audited(request):
            served = self._models.find(asked.model)
            ids = await served.prompts.tokenize(client_of(request).bound(asked))
        text_of = served.tokenizer.token_text
        answer = {
            "count": len(ids),
            "max_model_len": served.model.max_model_len,
            "tokens": ids,
            "token_strs": [text_of(token_id) for token_id in ids] if parsed.body.return_token_strs else None,
        }
        return await _uncharged(answer, parsed.ignored, request_context)

    async def _detokenize(self, request: Request, request_context: RequestContext) -> Response:
        parsed = await self._opener.read(DetokenizeBody, request)
        (asked,) = parsed.requests
        with self._request_contexts.audited(request):
            text = await self._models.find(asked.model).prompts.detokenize(client_of(request).bound(asked))
        return await _uncharged({"prompt": text}, parsed.ignored, request_context)

    async def _render(
        self, kind: type[TextBody] | type[ChatBody], request: Request, request_context: RequestContext
    ) -> Response:
        """Return the input of the engine: a list with one object per prompt for texts, and one object for a chat.
        `prompt` is an extension: vLLM returns the tokens alone."""
        parsed = await self._opener.read(kind, request)
        rendered, num_repeated = list[JSON](), 0
        opened = await self._opener.open(parsed, request, request_context)
        with self._request_contexts.audited(request):
            for one in opened:
                text = await one.prompt_text()
                num_repeated += len(text) + ID_CHARS * len(one.prompt_ids)
                if num_repeated > MAX_REPEATED:
                    raise RequestError.at("prompt", "too large to repeat in the response; send fewer prompts at once")
                names = {"request_id": one.request.id, "model": one.model_name}
                rendered.append({**names, "token_ids": one.prompt_ids, "prompt": text})
                await asyncio.sleep(0)  # a body may have a thousand prompts: let other tasks run
        return await _uncharged(rendered if kind is TextBody else rendered[0], parsed.ignored, request_context)


async def _uncharged(answer: object, ignored: Mapping[str, str], request_context: RequestContext) -> Response:
    """Return the answer to a call that counts as one request, but as no tokens, for the key's limits."""
    return json_answer(answer, {**await request_context.charge([]), **ignored})


async def _forms(body: TextBody | ChatBody, opened: Sequence[Completion]) -> list[Form]:
    """Return the form of each completion. Raises RequestError if it would repeat too much of the prompts."""
    tokenizer = opened[0].service.tokenizer
    if isinstance(body, ChatBody):
        if body.stream:  # a whole response has the prompt only once
            _check_repeated(body, opened, 0)
        return [ChatForm(tokenizer, hides_thinking=body.hides_thinking)]
    forms, num_echoed = list[Form](), 0
    num_echo_logprobs = body.logprobs if body.echo else None
    for one in opened:
        echo = await one.prompt_text() if body.echo else ""
        num_echoed += len(echo) * one.n
        _check_repeated(body, opened, num_echoed)
        form = TextForm(tokenizer, echo=echo, num_echo_logprobs=num_echo_logprobs, has_answer=not body.is_prompt_all)
        forms.append(form)
    return forms


def _check_repeated(body: TextBody | ChatBody, opened: Sequence[Completion], num_echoed: int) -> None:
    """Limit the prompt text and ids repeated for each choice. Raises RequestError."""
    num = num_echoed + (ID_CHARS * sum(one.n * len(one.prompt_ids) for one in opened) if body.return_token_ids else 0)
    if num > MAX_REPEATED:
        problem = "prompts times n are too large to repeat in the response; omit it, or request fewer choices"
        raise RequestError.at("echo" if num_echoed else "return_token_ids", problem)


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
