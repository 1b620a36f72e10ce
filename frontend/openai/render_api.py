"""POST /v1/completions/render and /v1/chat/completions/render, as in vLLM: the engine input of a request, without
generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from core.types.errors import RequestError
from frontend.access.limits import RequestContext
from frontend.http.event_stream import JSON, json_answer
from frontend.http.request_contexts import ID_CHARS, MAX_REPEATED, HttpRequestContexts, Opener
from frontend.openai.types import ChatBody, TextBody
from frontend.text.completion import Completion, Models


class RenderApi:
    """Render endpoints. They take the same bodies as the generation endpoints, within the same limits. A call counts as
    a request, but no tokens, against the key's limits."""

    def __init__(
        self, models: Models, request_contexts: HttpRequestContexts, *, clamps_max_tokens: bool = False
    ) -> None:
        """clamps_max_tokens: as in Opener."""
        self._request_contexts = request_contexts
        self._opener = Opener(models, request_contexts, clamps_max_tokens=clamps_max_tokens)

    def add_to(self, app: FastAPI) -> None:
        text, chat = partial(self._render, TextBody), partial(self._render, ChatBody)
        app.add_api_route("/v1/completions/render", self._request_contexts.route(text), methods=["POST"])
        app.add_api_route("/v1/chat/completions/render", self._request_contexts.route(chat), methods=["POST"])

    async def _render(
        self, kind: type[TextBody] | type[ChatBody], request: Request, request_context: RequestContext
    ) -> Response:
        """Return a list with one object per prompt for texts, and one object for a chat."""
        parsed = await self._opener.read(kind, request)
        opened = await self._opener.open(parsed, request, request_context)
        with self._request_contexts.audited(request):
            rendered = await self._rendered(opened)
        headers = {**await request_context.charge([]), **parsed.ignored}
        content = rendered if kind is TextBody else rendered[0]
        return json_answer(content, headers)

    async def _rendered(self, opened: Sequence[Completion]) -> list[JSON]:
        """Return the objects. `prompt` is an extension: vLLM returns the tokens alone. Raises RequestError."""
        rendered, num_chars = list[JSON](), 0
        for one in opened:
            text = await one.prompt_text()
            num_chars += len(text) + ID_CHARS * len(one.prompt_ids)
            if num_chars > MAX_REPEATED:
                text = "prompt: too large to repeat in the response; send fewer prompts at once"
                raise RequestError(text, param="prompt")
            names = {"request_id": one.request.id, "model": one.model_name}
            rendered.append({**names, "token_ids": one.prompt_ids, "prompt": text})
            await asyncio.sleep(0)  # a body may have a thousand prompts: let other tasks run
        return rendered
