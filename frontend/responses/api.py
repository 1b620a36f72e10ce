"""POST /v1/responses, and stored responses: GET and DELETE /v1/responses/{id}, GET /v1/responses/{id}/input_items."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.types.errors import RequestError, UnsupportedField
from frontend.access.limits import RequestContext
from frontend.http.connections import HTTP_ENDPOINT
from frontend.http.event_stream import JSON, json_answer, to_json, whole_answer
from frontend.http.request_contexts import Endpoints, HttpRequestContexts, Opener, client_of, tenant_of
from frontend.openai.errors import OpenAIErrors
from frontend.openai.fields import also_ignored
from frontend.responses.answer import ResponseAnswer
from frontend.responses.store import SMALL_BYTES
from frontend.responses.stored import StoredResponses
from frontend.responses.types import ResponsesBody, StoredTurn, Turn, id_of
from frontend.text.completion import Models
from frontend.text.completion_request import MAX_REQUEST_BYTES

T = TypeVar("T")

_LISTED, _MAX_LISTED = 20, 100  # items per page


class ResponsesApi:
    """Endpoints of the Responses API. Each call counts as a request against the key's limits."""

    def __init__(self, models: Models, request_contexts: HttpRequestContexts, stored: StoredResponses) -> None:
        self._models = models
        self._request_contexts = request_contexts
        self._opener = Opener(models, request_contexts)
        self._stored = stored

    @property
    def endpoints(self) -> Endpoints:
        """Generation endpoints, by path."""
        return {"/v1/responses": self.create}

    def add_to(self, app: FastAPI) -> None:
        for path, method, endpoint in (
            ("/v1/responses/{id}", "GET", self._read),
            ("/v1/responses/{id}", "DELETE", self._delete),
            ("/v1/responses/{id}/input_items", "GET", self._list),
        ):
            app.add_api_route(path, self._request_contexts.route(endpoint), methods=[method])

    async def create(self, request: Request) -> Response:
        request.state.errors = ResponsesErrors()
        return self._request_contexts.answer(request, self._create)

    async def _create(self, request: Request, request_context: RequestContext) -> Response:
        id = f"resp_{secrets.token_hex(16)}"
        turn = await self._request_contexts.read(ResponsesBody, request, partial(Turn.of, request, id))
        if turn.parsed is None:
            turn = await self._resolve(turn, request)
        assert turn.parsed
        (completion,) = await self._opener.open(turn.parsed, request, request_context)
        ignored = also_ignored(turn.parsed.ignored, completion.ignored)
        headers = {**await request_context.charge([completion]), **ignored}
        body, tenant = turn.parsed.body, tenant_of(request)
        defaults, echoed = completion.service.model.sampling_defaults, turn.echoed_fields
        chosen = {name: defaults[name] for name in ("temperature", "top_p") if echoed[name] is None}

        async def keep(response: JSON) -> bool:
            value = to_json({"response": response, "input": turn.items})
            return await self._stored.put(tenant, id, value)

        answer = ResponseAnswer(
            id=id,
            completion=completion,
            echoed_fields={**echoed, **chosen},
            keep=keep,
            stores=body.store is not False and self._stored.stores,
            is_streamed=bool(body.stream),
        )
        if body.stream:
            request.state.errors = ResponsesErrors(answer)
            return self._request_contexts.stream(request, answer.events(), headers)
        return await whole_answer(request.receive, answer.whole(), headers)

    async def _resolve(self, turn: Turn, request: Request) -> Turn:
        """Resolve the stored responses that the turn refers to. Raises UnknownResponse, StoreUnavailable,
        RequestError."""
        stored, num_bytes = dict[str, bytes](), 0
        with self._request_contexts.audited(request), ExitStack() as held:
            for id, field in turn.needed.items():
                stored[id] = await self._stored.get(tenant_of(request), id, held, param=field)
                num_bytes += len(stored[id])
                if num_bytes > MAX_REQUEST_BYTES:
                    problem = f"the referenced responses exceed {MAX_REQUEST_BYTES} bytes; reference fewer"
                    raise RequestError.at("input", problem)
            return await self._run(request, num_bytes, partial(turn.completed, stored, request))

    async def _read(self, request: Request, request_context: RequestContext) -> Response:
        if request.query_params.get("stream") in ("true", "True", "1"):
            raise UnsupportedField.at("stream", "stored responses cannot be streamed")
        return await self._shown(request, request_context, lambda turn: turn.response)

    async def _delete(self, request: Request, request_context: RequestContext) -> Response:
        id = request.path_params["id"]
        with self._request_contexts.audited(request):
            await self._stored.delete(tenant_of(request), id)
        return json_answer({"id": id, "object": "response", "deleted": True}, await request_context.charge([]))

    async def _list(self, request: Request, request_context: RequestContext) -> Response:
        return await self._shown(request, request_context, partial(_page, query=dict(request.query_params)))

    async def _shown(
        self, request: Request, request_context: RequestContext, part: Callable[[StoredTurn], object]
    ) -> Response:
        """Return a part of a stored response, whose memory stays reserved until it has been sent."""
        with ExitStack() as held:
            with self._request_contexts.audited(request):
                value = await self._stored.get(tenant_of(request), request.path_params["id"], held)
                body = await self._run(request, len(value), lambda: to_json(part(StoredTurn.of(value))))
            headers = await request_context.charge([])
            return HeldAnswer(body, headers, held.pop_all(), within_s=HTTP_ENDPOINT.message_s)

    async def _run(self, request: Request, num_bytes: int, work: Callable[[], T]) -> T:
        """Run `work` on `num_bytes` bytes, on another thread unless they are few."""
        if num_bytes <= SMALL_BYTES:
            return work()
        return await self._models.default.threads.run(client_of(request).key_id, work)


def _page(turn: StoredTurn, query: Mapping[str, str]) -> JSON:
    """Return the requested page of input items. Raises RequestError."""
    limit, order, after = query.get("limit", str(_LISTED)), query.get("order", "desc"), query.get("after")
    if not (limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= _MAX_LISTED):
        raise RequestError.at("limit", f"must be from 1 to {_MAX_LISTED}")
    if order not in ("asc", "desc"):
        raise RequestError.at("order", "must be asc or desc")
    ordered = turn.input[::-1] if order == "desc" else turn.input
    begin = 0
    if after:
        begin = next((n for n, item in enumerate(ordered, 1) if id_of(item) == after), len(ordered))
    listed = ordered[begin : begin + int(limit)]
    ids = [id_of(item) for item in listed] or [""]
    has_more = begin + len(listed) < len(ordered)
    return {"object": "list", "data": listed, "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}


_PART_BYTES = 64 * 1024  # after each part the event loop runs other tasks, and a slow client is awaited


class HeldAnswer(Response):
    """JSON response, sent in parts. A client that takes too long to read it is disconnected."""

    def __init__(self, written: bytes, headers: Mapping[str, str], held: ExitStack, *, within_s: float) -> None:
        """held: closed at the end, whatever the outcome."""
        super().__init__(written, media_type="application/json", headers=dict(headers))
        self._held = held
        self._within_s = within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            try:
                async with asyncio.timeout(self._within_s):
                    await self._send_all(send)
            except TimeoutError:
                return  # the response is incomplete, so the server closes the connection

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for begin in range(0, len(self.body), _PART_BYTES):
            part = self.body[begin : begin + _PART_BYTES]
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


# Fields of a chat and their names in this API. An index after `messages` is dropped: it does not count items.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_OF_CHAT = re.compile(rf"({'|'.join(_NAMES)})\b[\w.\[\]]*")


class ResponsesErrors(OpenAIErrors):
    """Error format for one request: OpenAI's, with this API's field names."""

    def __init__(self, answer: ResponseAnswer | None = None) -> None:
        """answer: the response being streamed, if any."""
        self._answer = answer

    def whole(self, error: BaseException) -> tuple[int, dict[str, Any]]:
        return super().whole(_named(error))

    def events(self, error: BaseException) -> bytes:
        assert self._answer
        return self._answer.failed(error)


def _named(error: BaseException) -> BaseException:
    """Return the error with this API's field name."""
    if not isinstance(error, RequestError) or not (found := _OF_CHAT.match(error.param or "")):
        return error
    if isinstance(error, UnsupportedField) and error.param in _NAMES:
        return error  # the client used the chat's name
    return type(error)(_OF_CHAT.sub(lambda name: _NAMES[name[1]], str(error), count=1), param=_NAMES[found[1]])
