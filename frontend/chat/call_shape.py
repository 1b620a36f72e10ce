"""How a template takes the calls of a conversation: transformers asks for one way, and some know another alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from frontend.chat.call_arguments import as_objects

_ARGUMENTS = {"probe": "b"}
_AS_PYTHON = "{'probe'"


@dataclass(frozen=True)
class CallShape:
    """The shape in which one template wants the calls of earlier messages."""

    has_objects: bool = True  # arguments are objects; False: JSON text
    no_content: str | None = None  # the content of a message that has calls alone

    @classmethod
    def of(cls, render: Callable[[Sequence[Mapping[str, Any]]], str | None]) -> CallShape:
        """The one with which the template does best. render: None where it refuses."""
        shapes = [cls(has_objects, content) for has_objects, content in product((True, False), (None, ""))]
        texts = [render(_conversation(_ARGUMENTS if shape.has_objects else '{"probe": "b"}', shape.no_content))
                 for shape in shapes]  # fmt: skip
        return max(zip(shapes, texts, strict=True), key=lambda tried: _how_well(tried[1]))[0]

    def told(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies of the messages, whose arguments are JSON text. Raises RequestError for such as are no object."""
        told = as_objects(messages) if self.has_objects else [dict(message) for message in messages]
        for message in told:
            if message["content"] is None:
                message["content"] = self.no_content
        return told


def _how_well(text: str | None) -> tuple[bool, bool, bool, int]:
    """That the call is there matters most, then that nothing is as Python writes it."""
    said = text or ""
    return text is not None, "probe" in said, _AS_PYTHON not in said, -said.count("None")


def _conversation(arguments: Any, content: str | None) -> list[dict[str, Any]]:
    call = {"id": "callnine1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "c", "tool_call_id": "callnine1", "name": "f"},
    ]
