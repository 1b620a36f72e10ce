"""Response of /v1/responses, whole or as server-sent events, from the events of one completion."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.types.errors import outcome_of
from core.types.request import FinishReason
from frontend.http.event_stream import JSON, data, to_json
from frontend.openai.errors import error_body
from frontend.openai.forms import ChatForm
from frontend.text.answer_reader import CallText
from frontend.text.completion import Completion
from frontend.text.events import Delta, Event, Finished, Summary, TokenUsage

# By item type: prefix of its ids, prefix of its events, and type of its one part.
_KINDS = {
    "message": ("msg", "response.output_text", "output_text"),
    "reasoning": ("rs", "response.reasoning_text", "reasoning_text"),
    "function_call": ("fc", "response.function_call_arguments", ""),
}


@dataclass(kw_only=True)
class ResponseAnswer:
    """Response to one request. Run once, either `whole` or `events`."""

    id: str
    completion: Completion
    echoed_fields: Mapping[str, Any]  # request fields that the response repeats
    keep: Callable[[JSON], Awaitable[bool]]  # stores a whole response; returns whether it was stored
    stores: bool  # value of `store` before the outcome is known
    is_streamed: bool
    created_at: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        form, self._events = ChatForm(self.completion.service.tokenizer), ResponseEvents()
        self._output = ResponseOutput(
            self.id.partition("_")[2],
            lambda delta: form.logprobs([delta])["content"],
            self._events if self.is_streamed else None,
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

    def failed(self, error: BaseException) -> bytes:
        """Return the last events of a stream that fails after it has started."""
        self._begin()
        self._output.finish(None)
        body, outcome = error_body(error)["error"], outcome_of(error)
        body["code"] = "server_error" if outcome.http >= 500 else outcome.code  # OpenAI's codes
        response = self._response("failed", output=self._output.items, error=body, store=False)
        self._events.emit("response.failed", response=response)
        return self._events.taken()

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

    async def _finished_response(self) -> JSON:
        finished, usage = self._finished, self._usage
        assert finished and usage
        is_cut = finished.reason is FinishReason.LENGTH
        response = self._response(
            "incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            output=self._output.items,
            usage={
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
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
            "model": self.completion.model_name,
            "output": [],
            "usage": None,
            "store": self.stores,
            **self.echoed_fields,
            **more,
        }


class ResponseOutput:
    """Output items of one response: reasoning, messages and function calls, in order.

    A streamed call may turn out not to be a call. Its item then ends as `incomplete`, and the rest of its text follows
    as a message. The whole response omits the item and has all of its text in the message.
    """

    def __init__(
        self, id: str, logprobs_of: Callable[[Delta], list[JSON]], stream: ResponseEvents | None = None
    ) -> None:
        """id: part of the items' ids. stream: None: items are not streamed."""
        self._id = id
        self._logprobs_of = logprobs_of
        self._stream = stream
        self._items: list[_Item] = []
        self._open: _Item | None = None

    def add(self, delta: Delta) -> None:
        if delta.has_more_than_text or not delta.has_logprobs:
            delta.write(self)
        elif delta.text or (self._open and self._open.kind == "message"):
            logprobs, item = self._logprobs_of(delta), self._opened("message")
            item.texts.append(delta.text)
            item.logprobs = [*(item.logprobs or ()), *logprobs]
            if self._stream:
                self._stream.piece_with(delta.text, logprobs)

    def finish(self, finished: Finished | None) -> None:
        """End the output. finished: None if the request failed; then nothing more is streamed. A successful answer has
        at least one item."""
        if finished is None:
            self._stream = None
        if finished and not self._items:
            self._opened("message")
        if self._open:
            self._close("completed" if finished and finished.reason is not FinishReason.LENGTH else "incomplete")

    @property
    def items(self) -> list[JSON]:
        """All items that have ended."""
        return [
            item.shown(item.status, item.broken + "".join(item.texts).removeprefix(item.rest))
            for item in self._items
            if item.status and not item.is_broken
        ]

    def think(self, thinking: str) -> None:
        self._opened("reasoning")
        self._piece(thinking)

    def text(self, text: str) -> None:
        self._opened("message")
        self._piece(text)

    def end_thinking(self) -> None:
        """Turn the text so far into thinking; in a stream it has been sent as a message."""
        if self._open and not self._stream:
            self._open.kind, self._open.texts = "reasoning", ["".join(self._open.texts).strip()]
            self._open.logprobs = None

    def call(self, call: CallText) -> None:
        if call.broken is not None:
            assert self._open
            self._open.is_broken = True
            self._close("incomplete")
            item = self._opened("message")
            item.broken, item.rest = call.broken, call.rest
            if call.rest:
                self._piece(call.rest)
            return
        if call.id:
            self._begin("function_call", name=call.name, call_id=call.id)
        if call.arguments:
            self._piece(call.arguments)

    def _piece(self, text: str) -> None:
        assert self._open
        self._open.texts.append(text)
        if self._stream:
            self._stream.piece(text)

    def _opened(self, kind: str) -> _Item:
        return self._open if self._open and self._open.kind == kind else self._begin(kind)

    def _begin(self, kind: str, **more: str) -> _Item:
        if self._open:
            self._close("completed")
        item = self._open = _Item(kind, f"{self._id}_{len(self._items)}", len(self._items), more)
        self._items.append(item)
        if self._stream:
            self._stream.begin(item.shown("in_progress"), index=item.index)
        return item

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        assert item
        item.status = status
        if self._stream:
            text = "".join(item.texts)
            self._stream.end(item.shown(status, text), index=item.index, text=text, logprobs=item.logprobs)


@dataclass
class _Item:
    kind: str
    id: str  # without the prefix of the item's kind
    index: int
    more: dict[str, str]  # name and call_id of a call
    texts: list[str] = field(default_factory=list)
    logprobs: list[JSON] | None = None
    status: str = ""  # set when the item ends
    is_broken: bool = False  # a call that turned out not to be one
    broken: str = ""  # text of a broken call that precedes this message
    rest: str = ""  # the suffix of `broken` with which `texts` begins

    def shown(self, status: str, text: str | None = None) -> JSON:
        """Return the item as the client sees it. text: None: it has only begun."""
        item: JSON = {"id": f"{_KINDS[self.kind][0]}_{self.id}", "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**item, **self.more, "arguments": text or ""}
        parts = [] if text is None else [_part(self.kind, text, self.logprobs)]
        return {**item, **({"role": "assistant"} if self.kind == "message" else {"summary": []}), "content": parts}


def _part(kind: str, text: str, logprobs: list[JSON] | None = None) -> JSON:
    """Return the one part of an item of this type. logprobs: those of a message; None: without logprobs."""
    part: JSON = {"type": _KINDS[kind][2], "text": text}
    return {**part, "annotations": [], "logprobs": logprobs or []} if kind == "message" else part


class ResponseEvents:
    """Writer of one response's events, numbered in sequence; buffers them until `taken`."""

    def __init__(self) -> None:
        self._number = 0
        self._written: list[bytes] = []
        self._kind = ""  # of the open item
        self._place: JSON = {}
        self._before = self._behind = b""  # template around the text of a delta event

    def taken(self) -> bytes:
        """Return the events written since the last call, possibly none."""
        written, self._written = b"".join(self._written), []
        return written

    def emit(self, event: str, /, **fields: Any) -> None:
        self._written.append(data({"type": event, **fields, "sequence_number": self._number}, name=event))
        self._number += 1

    def begin(self, item: JSON, *, index: int) -> None:
        """Open an item. item: its initial state, without content."""
        self.emit("response.output_item.added", output_index=index, item=item)
        self._kind = item["type"]
        _, name, type = _KINDS[self._kind]
        self._place = {"item_id": item["id"], "output_index": index} | ({"content_index": 0} if type else {})
        if type:
            self.emit("response.content_part.added", **self._place, part=_part(self._kind, ""))
        head = to_json({"type": f"{name}.delta", **self._place})[:-1]
        self._before = b'event: %b.delta\ndata: %b,"delta":' % (name.encode(), head)
        self._behind = b'%b,"sequence_number":' % (b',"logprobs":[]' if self._kind == "message" else b"")

    def piece(self, text: str) -> None:
        """Write a delta of the open item."""
        self._written.append(b"%b%b%b%d}\n\n" % (self._before, to_json(text), self._behind, self._number))
        self._number += 1

    def piece_with(self, text: str, logprobs: list[JSON]) -> None:
        self.emit(f"{_KINDS[self._kind][1]}.delta", **self._place, delta=text, logprobs=logprobs)

    def end(self, item: JSON, *, index: int, text: str, logprobs: list[JSON] | None) -> None:
        """Close the open item. item: its final state. text: the concatenation of its deltas."""
        _, name, type = _KINDS[self._kind]
        if type:
            more = {"logprobs": logprobs or []} if self._kind == "message" else {}
            self.emit(f"{name}.done", **self._place, text=text, **more)
            self.emit("response.content_part.done", **self._place, part=_part(self._kind, text, logprobs))
        else:
            self.emit(f"{name}.done", **self._place, name=item["name"], arguments=text)
        self.emit("response.output_item.done", output_index=index, item=item)
