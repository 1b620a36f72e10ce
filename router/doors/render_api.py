"""POST /v1/completions/render and /v1/chat/completions/render, as vLLM has them: what a request would send to an
engine, without an answer."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.access.visit import Visit
from router.doors.event_stream import to_json
from router.doors.http_visits import HttpVisits
from router.doors.openai_forms import JSON
from router.doors.openai_types import ChatBody, TextBody
from router.doors.opened import Opener
from router.text.completion import Completion, Completions


class RenderApi:
    """Takes the same bodies as the endpoints that answer, within the same bounds, by the same code. A key's limits
    count each call as a request, and no tokens of it."""

    def __init__(self, completions: Completions, visits: HttpVisits) -> None:
        self._completions = completions
        self._visits = visits
        self._opener = Opener(completions, visits)

    def add_to(self, app: FastAPI) -> None:
        app.add_api_route("/v1/completions/render", self.text, methods=["POST"])
        app.add_api_route("/v1/chat/completions/render", self.chat, methods=["POST"])

    async def text(self, request: Request) -> Response:
        """One object for each prompt, in a list."""
        return self._visits.answer(request, partial(self._render, TextBody))

    async def chat(self, request: Request) -> Response:
        """One object."""
        return self._visits.answer(request, partial(self._render, ChatBody))

    async def _render(self, kind: type[TextBody] | type[ChatBody], request: Request, visit: Visit) -> Response:
        asked = await self._opener.read(kind, request)
        opened = await self._opener.open(asked, request, visit)
        rendered = [await self._rendered(one) for one in opened]
        headers = {**await visit.charge([]), **asked.ignored}
        content = rendered if kind is TextBody else rendered[0]
        return Response(to_json(content), media_type="application/json", headers=headers)

    async def _rendered(self, one: Completion) -> JSON:
        """The text is an extension: vLLM has the tokens alone."""
        return {
            "request_id": one.request.id,
            "model": self._completions.model.id,
            "token_ids": one.prompt_ids,
            "prompt": await self._completions.prompts.text_of(one.request, one.prompt_ids),
        }
