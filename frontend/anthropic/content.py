"""What an answer says, as the content blocks of Anthropic's Messages API: whole, or as the events of a stream."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from frontend.http.event_stream import data
from frontend.http.json_response import JSON, to_json
from frontend.text.answer_reader import CallText
from frontend.text.events import Delta

_SIGNATURE = (
    "unsigned"  # the API has one of what was thought, and clients may ask for it; here nothing is checked by it
)
_PIECE = "\x00"  # stands for that of an event


class ContentBlocks(Protocol):
    """Takes what an answer says, in its order."""

    def think(self, thinking: str) -> None: ...

    def text(self, text: str) -> None: ...

    def call(self, call: CallText) -> None: ...


def say(delta: Delta, blocks: ContentBlocks) -> None:
    """All of it."""
    if delta.thinking:
        blocks.think(delta.thinking)
    at = 0
    for call in delta.calls:
        if call.at > at:
            blocks.text(delta.text[at : call.at])
            at = call.at
        blocks.call(call)
    if at < len(delta.text):
        blocks.text(delta.text[at:])


class WholeContent:
    """The blocks of a whole answer. What began as a call and is none is text, all of it."""

    def __init__(self, *, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking
        self._blocks: list[tuple[JSON, list[str]]] = []  # each with its text, in pieces

    def think(self, thinking: str) -> None:
        self._of("thinking").append("" if self._hides_thinking else thinking)

    def text(self, text: str) -> None:
        self._of("text").append(text)

    def call(self, call: CallText) -> None:
        if call.broken is not None:
            self._blocks.pop()  # nothing has come since it began
            self.text(call.broken)
        elif call.id:
            self._blocks.append((_call(call), [call.arguments]))
        else:
            self._of("tool_use").append(call.arguments)

    def content(self) -> list[JSON]:
        """Each as it is in the answer."""
        return [_filled(block, "".join(pieces)) for block, pieces in self._blocks]

    def _of(self, type: str) -> list[str]:
        if not self._blocks or self._blocks[-1][0]["type"] != type:
            self._blocks.append(({"type": type}, []))
        return self._blocks[-1][1]


class StreamedContent:
    """The events of a stream's blocks. What began as a call and is none ends there, and goes on as text.

    Those of one block differ in their piece of text alone: the rest is written once.
    """

    def __init__(self, *, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking
        self._index = -1
        self._type = ""  # of the open block; empty: none is
        self._before = self._behind = b""
        self._written: list[bytes] = []

    def think(self, thinking: str) -> None:
        if self._type != "thinking":
            self._open({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking")
        if not self._hides_thinking:
            self._add(thinking)

    def text(self, text: str) -> None:
        if self._type != "text":
            self._open({"type": "text", "text": ""}, "text_delta", "text")
        self._add(text)

    def call(self, call: CallText) -> None:
        if call.broken is not None:
            if call.rest:  # which begins another block
                self.text(call.rest)
            return
        if call.id:
            self._open({**_call(call), "input": {}}, "input_json_delta", "partial_json")
        if call.arguments:
            self._add(call.arguments)

    def close(self) -> None:
        """The open block, if any, is whole."""
        if self._type == "thinking":
            self._event("content_block_delta", delta={"type": "signature_delta", "signature": _SIGNATURE})
        if self._type:
            self._event("content_block_stop")
        self._type = ""

    def taken(self) -> bytes:
        """What has been written since the last time."""
        written = b"".join(self._written)
        self._written.clear()
        return written

    def _open(self, block: JSON, delta: str, piece: str) -> None:
        self.close()
        self._index += 1
        self._type = block["type"]
        self._event("content_block_start", content_block=block)
        one = self._named("content_block_delta", delta={"type": delta, piece: _PIECE})
        self._before, self._behind = one.split(to_json(_PIECE))

    def _add(self, piece: str) -> None:
        self._written.append(b"%b%b%b" % (self._before, to_json(piece), self._behind))

    def _event(self, name: str, **content: Any) -> None:
        self._written.append(self._named(name, **content))

    def _named(self, name: str, **content: Any) -> bytes:
        return data({"type": name, "index": self._index, **content}, name=name)


def _call(call: CallText) -> JSON:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _filled(block: JSON, text: str) -> JSON:
    match block["type"]:
        case "thinking":
            return {**block, "thinking": text, "signature": _SIGNATURE}
        case "tool_use":  # a JSON object, as the model wrote it
            return {**block, "input": msgspec.Raw(text.encode() or b"{}")}
    return {**block, "text": text}
