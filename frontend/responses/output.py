"""Output items of a response: reasoning, messages and function calls, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from core.types.request import FinishReason
from frontend.http.event_stream import JSON
from frontend.responses.events import part_of
from frontend.text.answer_reader import CallText
from frontend.text.events import Delta, Finished

_PREFIX = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class Reporter(Protocol):
    """Receiver of items as they come."""

    def begin(self, item: JSON, *, index: int) -> None: ...
    def piece(self, text: str) -> None: ...
    def piece_with(self, text: str, logprobs: list[JSON]) -> None: ...
    def end(self, item: JSON, *, index: int, text: str, logprobs: list[JSON] | None) -> None: ...


class ResponseOutput:
    """Output of one response.

    A call may turn out to be none after it was streamed. Its item then ends as `incomplete`, and the rest of its text
    follows as a message. The whole response omits the item and has all of its text in the message.
    """

    def __init__(self, id: str, logprobs_of: Callable[[Delta], list[JSON]], reporter: Reporter | None = None) -> None:
        """id: part of the items' ids. reporter: None: items are not streamed."""
        self._id = id
        self._logprobs_of = logprobs_of
        self._reporter = reporter
        self._items: list[_Item] = []
        self._open: _Item | None = None

    def add(self, delta: Delta) -> None:
        if not delta.has_more_than_text:
            if delta.text or (delta.has_logprobs and self._open and self._open.kind == "message"):
                self.text(delta.text, self._logprobs_of(delta) if delta.has_logprobs else None)
            return
        delta.write(self)

    def think(self, thinking: str) -> None:
        self._opened("reasoning")
        self._piece(thinking)

    def finish(self, finished: Finished | None) -> None:
        """End the output. finished: None if the request failed; then nothing more is streamed. A successful answer has
        at least one item."""
        if finished is None:
            self._reporter = None
        if finished and not self._items:
            self._opened("message")
        if self._open:
            self._close("completed" if finished and finished.reason is not FinishReason.LENGTH else "incomplete")

    @property
    def items(self) -> list[JSON]:
        """All items that have ended."""
        return [item.whole() for item in self._items if item.status and not item.is_broken]

    def end_thinking(self) -> None:
        """Turn the text so far into thinking; in a stream it has been sent as a message."""
        if self._open and not self._reporter:
            self._open.kind, self._open.texts = "reasoning", ["".join(self._open.texts).strip()]
            self._open.id = f"{_PREFIX['reasoning']}_{self._id}_{self._open.index}"
            self._open.logprobs = None

    def text(self, text: str, logprobs: list[JSON] | None = None) -> None:
        item = self._opened("message")
        if logprobs is None:
            return self._piece(text)
        item.texts.append(text)
        item.logprobs = [*(item.logprobs or ()), *logprobs]
        if self._reporter:
            self._reporter.piece_with(text, logprobs)

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
        if self._reporter:
            self._reporter.piece(text)

    def _opened(self, kind: str) -> _Item:
        return self._open if self._open and self._open.kind == kind else self._begin(kind)

    def _begin(self, kind: str, **more: str) -> _Item:
        if self._open:
            self._close("completed")
        index = len(self._items)
        item = self._open = _Item(kind, f"{_PREFIX[kind]}_{self._id}_{index}", index, more)
        self._items.append(item)
        if self._reporter:
            self._reporter.begin(item.begun(), index=index)
        return item

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        assert item
        item.status = status
        if self._reporter:
            text = "".join(item.texts)
            self._reporter.end(item.written(text), index=item.index, text=text, logprobs=item.logprobs)


@dataclass
class _Item:
    kind: str
    id: str
    index: int
    more: dict[str, str]  # name and call_id of a call
    texts: list[str] = field(default_factory=list)
    logprobs: list[JSON] | None = None
    status: str = ""  # set when it ends
    is_broken: bool = False  # a call that turned out to be none
    broken: str = ""  # text of a broken call that precedes this message
    rest: str = ""  # the suffix of `broken` with which `texts` begins

    def begun(self) -> JSON:
        return self._head("in_progress") | self._content([])

    def written(self, text: str) -> JSON:
        content = [] if self.kind == "function_call" else [part_of(self.kind, text, self.logprobs)]
        return self._head(self.status) | self._content(content, text)

    def whole(self) -> JSON:
        return self.written(self.broken + "".join(self.texts).removeprefix(self.rest))

    def _head(self, status: str) -> JSON:
        return {"id": self.id, "type": self.kind, "status": status}

    def _content(self, parts: list[JSON], text: str = "") -> JSON:
        match self.kind:
            case "message":
                return {"role": "assistant", "content": parts}
            case "reasoning":
                return {"summary": [], "content": parts}
        return {**self.more, "arguments": text}
