"""Responses of Anthropic's Messages API, whole or streamed, from the events of a completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic_core import from_json

from core.types.request import FinishReason
from frontend.http.event_stream import JSON, data, to_json
from frontend.openai.forms import WholeChoice
from frontend.text.answer_reader import CallText
from frontend.text.completion import Completion
from frontend.text.events import Delta, Finished, Summary, TokenUsage

# Anthropic signs thinking blocks, and clients may require a signature. It is not verified here.
_SIGNATURE = "unsigned"
_PIECE = "\x00"  # placeholder in the event template


@dataclass(frozen=True, kw_only=True)
class AnthropicAnswer:
    """Response to one request."""

    id: str
    completion: Completion  # with one choice
    hides_thinking: bool  # thinking blocks are sent empty

    async def whole(self) -> JSON:
        """Return the whole response. Raises ClusterError."""
        whole, ending, usage = WholeChoice(), JSON(), TokenUsage()
        async with self.completion.run() as arrivals:
            async for events in arrivals:
                for event in events:
                    match event:
                        case Delta():
                            event.write(whole)
                        case Finished():
                            ending = _ending(event)
                        case Summary():
                            usage = event.usage
        content = list(content_of(whole, hides_thinking=self.hides_thinking))
        return {**self._head, "content": content, **ending, "usage": _usage(usage)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events, ending with message_stop. Raises ClusterError."""
        blocks = StreamedContent(hides_thinking=self.hides_thinking)
        opening, ending = self._opening(), JSON()
        async with self.completion.run() as arrivals:
            async for events in arrivals:
                for event in events:
                    match event:
                        case Delta():
                            event.write(blocks)
                        case Finished():
                            ending = _ending(event)
                            blocks.close()
                        case Summary(usage=usage):
                            last = {"type": "message_delta", "delta": ending, "usage": _usage(usage)}
                            yield data(last, name="message_delta") + data({"type": "message_stop"}, name="message_stop")
                            return
                if written := opening + blocks.taken():
                    yield written
                    opening = b""

    @property
    def _head(self) -> JSON:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.completion.model_name}

    def _opening(self) -> bytes:
        # The number of cached tokens is known at the end only; 0 is sent until then.
        usage = TokenUsage(prompt_tokens=len(self.completion.prompt_ids))
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
        return data({"type": "message_start", "message": message}, name="message_start")


def _ending(finished: Finished) -> JSON:
    reason = "end_turn"
    if finished.reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif finished.num_calls:
        reason = "tool_use"
    elif finished.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": finished.stop}


def _usage(usage: TokenUsage) -> JSON:
    """Return Anthropic's usage. cache_creation is 0: caching is implicit here, and not billed."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def content_of(whole: WholeChoice, *, hides_thinking: bool = False) -> Iterator[JSON]:
    """Yield the content blocks of a whole response."""
    for kind, pieces, call in whole.blocks:
        text = "".join(pieces)
        if kind == "thinking":
            yield {"type": "thinking", "thinking": "" if hides_thinking else text, "signature": _SIGNATURE}
        elif call:
            yield {**_tool_use(call), "input": _input(text)}
        else:
            yield {"type": "text", "text": text}


class StreamedContent:
    """Events of streamed content blocks. The block of a malformed call ends, and the rest of its text becomes a text
    block.

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
        """Do nothing: the text has been sent already."""

    def call(self, call: CallText) -> None:
        if call.broken is not None:
            if call.rest:  # opens a new block
                self.text(call.rest)
            return
        if call.id:
            self._open({**_tool_use(call), "input": {}}, "input_json_delta", "partial_json")
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
        self._event("content_block_delta", delta={"type": delta, piece: _PIECE})
        self._before, self._behind = self._written.pop().split(to_json(_PIECE))

    def _add(self, piece: str) -> None:
        self._written.append(b"%b%b%b" % (self._before, to_json(piece), self._behind))

    def _event(self, name: str, **content: Any) -> None:
        self._written.append(data({"type": name, "index": self._index, **content}, name=name))


def _tool_use(call: CallText) -> JSON:
    return {"type": "tool_use", "id": call.id, "name": call.name}


def _input(text: str) -> object:
    """Return the model's JSON object verbatim. If it is cut off, return its complete members."""
    try:
        msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return from_json(text, allow_partial=True)
    return msgspec.Raw(text.encode() or b"{}")
