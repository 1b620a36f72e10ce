"""Anthropic's Messages API: POST /v1/messages, whole and streamed, and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from frontend.access.request_context import Visit
from frontend.anthropic.answer import AnthropicAnswer
from frontend.anthropic.types import CountTokensBody, MessagesBody
from frontend.http.event_stream import EventStream, whole_answer
from frontend.http.json_response import json_answer
from frontend.http.open_requests import Opener
from frontend.http.request_contexts import Endpoints, HttpVisits, client_of
from frontend.text.models import Models


class AnthropicApi:
    """The endpoints."""

    def __init__(self, models: Models, visits: HttpVisits) -> None:
        self._models = models
        self._visits = visits
        self._opener = Opener(models, visits)

    @property
    def endpoints(self) -> Endpoints:
        return {
            "/v1/messages": self._visits.route(self._messages),
            "/v1/messages/count_tokens": self._visits.route(self._count_tokens),
        }

    async def _messages(self, request: Request, visit: Visit) -> Response:
        asked = await self._opener.read(MessagesBody, request)
        opened = await self._opener.open(asked, request, visit)
        headers = {**await visit.charge(opened), **asked.ignored}
        answer = AnthropicAnswer(
            id=f"msg_{request.state.request_id}",
            model=opened[0].service.model.id,
            completion=opened[0],
            hides_thinking=asked.body.hides_thinking,
        )
        if asked.body.stream:
            return EventStream(answer.events(), more_headers=headers, errors=request.state.errors)
        return await whole_answer(request.receive, answer.whole(), headers)

    async def _count_tokens(self, request: Request, visit: Visit) -> Response:
        """A key's limits count it as a request, and no tokens of it."""
        asked = await self._opener.read(CountTokensBody, request)
        with self._visits.noted(request):
            served = self._models.find(asked.requests[0].model)
            ids = await served.prompts.tokenize(client_of(request).bound(asked.requests[0]))
        headers = {**await visit.charge([]), **asked.ignored}
        return json_answer({"input_tokens": len(ids)}, headers)
