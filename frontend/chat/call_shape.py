"""Form in which a chat template expects tool calls. Templates deviate from transformers' form, so it is probed."""

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
    """Form of tool calls for one template."""

    has_objects: bool = True  # arguments are objects; False: JSON text
    no_content: str | None = None  # content of a message that has only calls

    @classmethod
    def of(cls, render: Callable[[Sequence[Mapping[str, Any]]], str | None]) -> CallShape:
        """Return the form that the template renders best. render: returns None if the template rejects the messages."""
        shapes = [cls(has_objects, content) for has_objects, content in product((True, False), (None, ""))]
        texts = [render(_conversation(_ARGUMENTS if shape.has_objects else '{"probe": "b"}', shape.no_content))
                 for shape in shapes]  # fmt: skip
        return max(zip(shapes, texts, strict=True), key=lambda candidate: _how_well(candidate[1]))[0]

    def convert(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of messages in this form. Raises RequestError for arguments that are not JSON objects."""
        copies = as_objects(messages) if self.has_objects else [dict(message) for message in messages]
        for message in copies:
            if message["content"] is None:
                message["content"] = self.no_content
        return copies


def _how_well(text: str | None) -> tuple[bool, bool, bool, int]:
    """Rank a rendering: the call must appear, then there should be no Python syntax."""
    rendered = text or ""
    return text is not None, "probe" in rendered, _AS_PYTHON not in rendered, -rendered.count("None")


def _conversation(arguments: Any, content: str | None) -> list[dict[str, Any]]:
    call = {"id": "callnine1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "c", "tool_call_id": "callnine1", "name": "f"},
    ]
