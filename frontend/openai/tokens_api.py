"""Prompts and tokens without generation, as in vLLM: POST /tokenize, /detokenize, /v1/completions/render and
/v1/chat/completions/render, GET /tokenizer_info; and GET /version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from core.types.errors import RequestError
from frontend.access.limits import RequestContext
from frontend.http.event_stream import JSON, json_answer
from frontend.http.request_contexts import ID_CHARS, MAX_REPEATED, HttpRequestContexts, Opener, client_of, peer_of
from frontend.openai.fields import OpenAIObject, ignored_header
from frontend.openai.messages import ChatSettings, Messages
from frontend.openai.types import ChatBody, TextBody
from frontend.text.completion_request import CompletionRequest
from frontend.text.models import Models
from frontend.text.prompt_encoder import num_chars

PACKAGE = "xpyd"


class TokenizeBody(ChatSettings):
    """POST /tokenize"""

    model: str | None = None
    prompt: str | None = None
    """Text to tokenize. Set either this or `messages`."""
    messages: Messages | None = None
    """Chat to tokenize, as in /v1/chat/completions."""
    add_special_tokens: bool | None = None
    """Default true for a prompt, as in /v1/completions, and false for messages, whose template adds them."""
    return_token_strs: bool | None = None


class DetokenizeBody(OpenAIObject):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


class TokensApi:
    """Tokenizer and render endpoints. A call counts as a request, but no tokens, against the key's limits."""

    def __init__(self, models: Models, request_contexts: HttpRequestContexts, *, clamps_max_tokens: bool) -> None:
        """clamps_max_tokens: as in Opener."""
        self._models = models
        self._request_contexts = request_contexts
        self._opener = Opener(models, request_contexts, clamps_max_tokens=clamps_max_tokens)

    def add_to(self, app: FastAPI) -> None:
        for path, endpoint in (
            ("/tokenize", self._tokenize),
            ("/detokenize", self._detokenize),
            ("/v1/completions/render", partial(self._render, TextBody)),
            ("/v1/chat/completions/render", partial(self._render, ChatBody)),
        ):
            app.add_api_route(path, self._request_contexts.route(endpoint), methods=["POST"])
        app.add_api_route("/tokenizer_info", self.tokenizer_info, methods=["GET"])
        app.add_api_route("/version", self.version, methods=["GET"])

    async def tokenizer_info(self, model: str = "") -> Response:
        """Return the special tokens and the chat template; with it, lm-eval needs no tokenizer of its own."""
        prompts = self._models.find(model).prompts
        tokens = {**dict.fromkeys(("bos_token", "eos_token", "pad_token")), **prompts.tokenizer.special_tokens}
        return JSONResponse({**tokens, "chat_template": prompts.chat_template.source or None})

    async def version(self) -> Response:
        return JSONResponse({"version": version(PACKAGE)})

    async def _tokenize(self, request: Request, request_context: RequestContext) -> Response:
        def build(body: TokenizeBody) -> tuple[TokenizeBody, CompletionRequest, dict[str, str]]:
            if (body.prompt is None) == (body.messages is None):
                raise RequestError.at("prompt", "set either prompt or messages")
            prompt = body.prompt if body.messages is None else body.chat(body.messages)
            completion_request = CompletionRequest(
                id=request.state.request_id,
                prompt=prompt or "",
                model=body.model or "",
                peer=peer_of(request),
                add_special_tokens=body.add_special_tokens,
            )
            num_chars(completion_request.prompt)  # a chat caches it
            return body, completion_request, ignored_header(body)

        body, completion_request, ignored = await self._request_contexts.read(TokenizeBody, request, build)
        with self._request_contexts.audited(request):
            served = self._models.find(completion_request.model)
            ids = await served.prompts.tokenize(client_of(request).bound(completion_request))
        text_of = served.tokenizer.token_text
        answer = {
            "count": len(ids),
            "max_model_len": served.model.max_model_len,
            "tokens": ids,
            "token_strs": [text_of(token_id) for token_id in ids] if body.return_token_strs else None,
        }
        return await _answer(answer, ignored, request_context)

    async def _detokenize(self, request: Request, request_context: RequestContext) -> Response:
        def build(body: DetokenizeBody) -> tuple[CompletionRequest, dict[str, str]]:
            completion_request = CompletionRequest(
                id=request.state.request_id, prompt=tuple(body.tokens), model=body.model or "", peer=peer_of(request)
            )
            return completion_request, ignored_header(body)

        completion_request, ignored = await self._request_contexts.read(DetokenizeBody, request, build)
        with self._request_contexts.audited(request):
            served = self._models.find(completion_request.model)
            text = await served.prompts.detokenize(client_of(request).bound(completion_request))
        return await _answer({"prompt": text}, ignored, request_context)

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
        return await _answer(rendered if kind is TextBody else rendered[0], parsed.ignored, request_context)


async def _answer(answer: object, ignored: Mapping[str, str], request_context: RequestContext) -> Response:
    return json_answer(answer, {**await request_context.charge([]), **ignored})
