"""Tool calls and thinking of a chat in the OpenAI API's format, streamed and whole."""

from __future__ import annotations

from typing import Any

from frontend.text.answer_reader import CallText
from frontend.text.events import Delta


def chunk_of(call: CallText) -> dict[str, Any]:
    """Return the `tool_calls` entry of a part of a call."""
    if call.id:
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.number, "id": call.id, "type": "function", "function": function}
    return {"index": call.number, "function": {"arguments": call.arguments}}


class WholeChoice:
    """Accumulates the deltas of a choice. Text that turned out not to be a call is kept as text."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: dict[int, CallText] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, delta: Delta) -> None:
        for call in delta.calls:
            if call.broken is not None:
                del self._calls[call.number]
            else:
                self._calls.setdefault(call.number, call)
                self._arguments.setdefault(call.number, []).append(call.arguments)
        self._thoughts.append(delta.thinking)
        text = delta.text_with_broken(is_whole=True) if delta.calls else delta.text
        if delta.num_thought is not None:
            self._thoughts = ["".join([*self._texts, text[: delta.num_thought]]).strip()]
            self._texts, text = [], text[delta.num_thought :]
        self._texts.append(text)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def thinking(self) -> str:
        return "".join(self._thoughts)

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(self._arguments[number])},
            }
            for number, call in self._calls.items()
        ]
