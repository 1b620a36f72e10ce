"""Anthropic's Messages API: POST /v1/messages, whole and streamed, and POST /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import Response

from core.types.errors import CapacityError, RateLimited, outcome_of
from frontend.access.limits import RequestContext
from frontend.anthropic.answer import AnthropicAnswer
from frontend.anthropic.types import CountTokensBody, MessagesBody
from frontend.http.event_stream import data, json_answer, whole_answer
from frontend.http.request_contexts import Endpoints, HttpRequestContexts, Opener, client_of
from frontend.openai.errors import error_body
from frontend.openai.fields import also_ignored
from frontend.text.completion import Models


class AnthropicApi:
    """Endpoints of the Messages API."""

    def __init__(self, models: Models, request_contexts: HttpRequestContexts) -> None:
        self._models = models
        self._request_contexts = request_contexts
        self._opener = Opener(models, request_contexts)

    @property
    def endpoints(self) -> Endpoints:
        return {
            "/v1/messages": self._request_contexts.route(self._messages),
            "/v1/messages/count_tokens": self._request_contexts.route(self._count_tokens),
        }

    async def _messages(self, request: Request, request_context: RequestContext) -> Response:
        parsed = await self._opener.read(MessagesBody, request)
        opened = await self._opener.open(parsed, request, request_context)
        headers = {**await request_context.charge(opened), **also_ignored(parsed.ignored, opened[0].ignored)}
        answer = AnthropicAnswer(
            id=f"msg_{request.state.request_id}", completion=opened[0], hides_thinking=parsed.body.hides_thinking
        )
        if parsed.body.stream:
            return self._request_contexts.stream(request, answer.events(), headers)
        return await whole_answer(request.receive, answer.whole(), headers)

    async def _count_tokens(self, request: Request, request_context: RequestContext) -> Response:
        """Count the prompt's tokens. Counts as a request, but no tokens, against the key's limits."""
        parsed = await self._opener.read(CountTokensBody, request)
        with self._request_contexts.audited(request):
            served = self._models.find(parsed.requests[0].model)
            ids = await served.prompts.tokenize(client_of(request).bound(parsed.requests[0]))
        headers = {**await request_context.charge([]), **parsed.ignored}
        return json_answer({"input_tokens": len(ids)}, headers)


_OVERLOADED = 529  # the cluster is full; 429 is for an API key's limits
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


class AnthropicErrors:
    """Error format of one request: {"type": "error", "error": {"type", "message"}, "request_id"}, with its status.

    Source: https://docs.claude.com/en/api/errors
    """

    keepalive = data({"type": "ping"}, name="ping")

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def whole(self, error: BaseException) -> tuple[int, dict[str, Any]]:
        is_full = isinstance(error, CapacityError) and not isinstance(error, RateLimited)
        status = _OVERLOADED if is_full else outcome_of(error).http
        return status, self._body(status, error_body(error)["error"]["message"])

    def http(self, status: int, *, phrase: str, message: str) -> dict[str, Any]:
        return self._body(status, message)

    def events(self, error: BaseException) -> bytes:
        return data(self.whole(error)[1], name="error")

    def _body(self, status: int, message: str) -> dict[str, Any]:
        type = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": type, "message": message}, "request_id": self._request_id}
