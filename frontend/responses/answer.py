"""Response of /v1/responses, whole or streamed, from the events of one completion."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from core.types.errors import outcome_of
from core.types.request import FinishReason
from frontend.http.event_stream import JSON
from frontend.openai.errors import error_body
from frontend.openai.forms import ChatForm
from frontend.responses.events import ResponseEvents
from frontend.responses.output import ResponseOutput
from frontend.text.completion import Completion
from frontend.text.events import Delta, Event, Finished, Summary, TokenUsage

Keep = Callable[[JSON], Awaitable[bool]]  # store a whole response; returns whether it was stored


@dataclass(kw_only=True)
class ResponseAnswer:
    """Response to one request. Run once, either `whole` or `events`."""

    id: str
    model: str
    completion: Completion
    form: ChatForm
    echoed_fields: Mapping[str, Any]  # request fields that the response repeats
    keep: Keep
    stores: bool  # value of `store` before the outcome is known
    is_streamed: bool
    created_at: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._events = ResponseEvents()
        self._output = ResponseOutput(
            self.id.partition("_")[2], partial(_logprobs, self.form), self._events if self.is_streamed else None
        )
        self._finished: Finished | None = None
        self._usage: TokenUsage | None = None
        self._has_begun = False

    async def whole(self) -> JSON:
        """Return the whole response. Raises ClusterError."""
        async with self.completion.run() as arrivals:
            async for arrived in arrivals:
                self._take(arrived)
        return await self._finished_response()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events; the last one carries the whole response. Raises ClusterError."""
        stream = self._events
        async with self.completion.run() as arrivals:
            async for arrived in arrivals:
                self._begin()
                self._take(arrived)
                if written := stream.taken():
                    yield written
        response = await self._finished_response()
        stream.emit(f"response.{response['status']}", response=response)
        yield stream.taken()

    def _begin(self) -> None:
        """Write the opening events, once."""
        if not self._has_begun:
            self._has_begun = True
            begun = self._response("in_progress")
            self._events.emit("response.created", response=begun)
            self._events.emit("response.in_progress", response=begun)

    def _take(self, arrived: Sequence[Event]) -> None:
        for event in arrived:
            match event:
                case Delta():
                    self._output.add(event)
                case Finished():
                    self._finished = event
                    self._output.finish(event)
                case Summary():
                    self._usage = event.usage

    def failed(self, error: BaseException) -> bytes:
        """Return the last events of a stream that fails after it has started."""
        self._begin()
        self._output.finish(None)
        body, outcome = error_body(error)["error"], outcome_of(error)
        body["code"] = "server_error" if outcome.http >= 500 else outcome.code  # OpenAI's codes
        response = self._response("failed", output=self._output.items, error=body, store=False)
        self._events.emit("response.failed", response=response)
        return self._events.taken()

    async def _finished_response(self) -> JSON:
        finished, usage = self._finished, self._usage
        assert finished and usage
        is_cut = finished.reason is FinishReason.LENGTH
        response = self._response(
            "incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self._output.items,
            usage=_usage(usage),
        )
        if self.stores:
            response["store"] = await self.keep(response)
        return response

    def _response(self, status: str, **more: Any) -> JSON:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": [],
            "usage": None,
            "store": self.stores,
            **self.echoed_fields,
            **more,
        }


def _logprobs(form: ChatForm, delta: Delta) -> list[JSON]:
    content: list[JSON] = form.logprobs([delta])["content"]
    return content


def _usage(usage: TokenUsage) -> JSON:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
