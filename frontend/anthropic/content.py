"""Content blocks of Anthropic's Messages API, whole or as stream events."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic_core import from_json

from frontend.http.event_stream import JSON, data, to_json
from frontend.text.answer_reader import CallText

# Anthropic signs thinking blocks, and clients may require a signature. It is not verified here.
_SIGNATURE = "unsigned"
_PIECE = "\x00"  # placeholder in the event template


class WholeContent:
    """Blocks of a whole response. A malformed call is kept as text."""

    def __init__(self, *, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking
        self._blocks: list[tuple[JSON, list[str]]] = []  # each block with pieces of its text

    def think(self, thinking: str) -> None:
        self._of("thinking").append("" if self._hides_thinking else thinking)

    def text(self, text: str) -> None:
        self._of("text").append(text)

    def end_thinking(self) -> None:
        thought = "".join(piece for _, pieces in self._blocks for piece in pieces).strip()
        self._blocks.clear()
        if thought:
            self.think(thought)

    def call(self, call: CallText) -> None:
        if call.broken is not None:
            self._blocks.pop()  # the last block is this call's: CallBroken comes directly after its arguments
            self.text(call.broken)
        elif call.id:
            self._blocks.append((_call(call), [call.arguments]))
        else:
            self._of("tool_use").append(call.arguments)

    def content(self) -> list[JSON]:
        """Return the blocks of the response."""
        return [_filled(block, "".join(pieces)) for block, pieces in self._blocks]

    def _of(self, type: str) -> list[str]:
        if not self._blocks or self._blocks[-1][0]["type"] != type:
            self._blocks.append(({"type": type}, []))
        return self._blocks[-1][1]


class StreamedContent:
    """Events of streamed blocks. After a malformed call its block ends, and the rest of its text is a text block.

    The events of one block differ only in their text, so each block's event template is encoded once.
    """

    def __init__(self, *, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking
        self._index = -1
        self._type = ""  # of the open block; empty if none is open
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

    def end_thinking(self) -> None:
        """Send nothing: the text has been sent."""

    def call(self, call: CallText) -> None:
        if call.broken is not None:
            if call.rest:  # opens a new block
                self.text(call.rest)
            return
        if call.id:
            self._open({**_call(call), "input": {}}, "input_json_delta", "partial_json")
        if call.arguments:
            self._add(call.arguments)

    def close(self) -> None:
        """Close the open block, if any."""
        if self._type == "thinking":
            self._event("content_block_delta", delta={"type": "signature_delta", "signature": _SIGNATURE})
        if self._type:
            self._event("content_block_stop")
        self._type = ""

    def taken(self) -> bytes:
        """Return the events written since the last call."""
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


def _input(text: str) -> object:
    """Return the model's JSON object verbatim. If it is cut off, return its complete members."""
    try:
        msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return from_json(text, allow_partial=True)
    return msgspec.Raw(text.encode() or b"{}")


def _filled(block: JSON, text: str) -> JSON:
    match block["type"]:
        case "thinking":
            return {**block, "thinking": text, "signature": _SIGNATURE}
        case "tool_use":
            return {**block, "input": _input(text)}
    return {**block, "text": text}
