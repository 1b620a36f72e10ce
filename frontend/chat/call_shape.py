"""Form in which a chat template expects tool calls. Templates deviate from transformers' form, so it is probed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from frontend.chat.call_arguments import check_size, object_or_none

_ARGUMENTS = {"probe": "b"}
_AS_PYTHON = "{'probe'"
_BROKEN = '{"probe": '
_LONG_ID, _NINE = "call_4f0a-1b2c3d4e5f60718293a4", "callnine1"
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class CallShape:
    """Form of tool calls for one template."""

    has_objects: bool = True  # arguments are objects; False: JSON text
    takes_text: bool = True  # arguments may be text instead of a JSON object
    takes_any_id: bool = True  # False: ids have nine alphanumerics, as in Mistral's templates
    no_content: str | None = None  # content of a message that has only calls

    @classmethod
    def of(cls, render: Callable[[Sequence[Mapping[str, Any]]], str | None]) -> CallShape:
        """Return the form that the template renders best. render: returns None if the template rejects the messages."""
        shapes = [cls(has_objects, no_content=content) for has_objects, content in product((True, False), (None, ""))]
        texts = [render(_conversation(_ARGUMENTS if shape.has_objects else '{"probe": "b"}', shape.no_content))
                 for shape in shapes]  # fmt: skip
        best = max(zip(shapes, texts, strict=True), key=lambda candidate: _how_well(candidate[1]))[0]
        broken = render(_conversation(_BROKEN, best.no_content))
        arguments = _ARGUMENTS if best.has_objects else '{"probe": "b"}'
        return replace(
            best,
            takes_text=not best.has_objects or "probe" in (broken or ""),
            takes_any_id=render(_conversation(arguments, best.no_content, id=_LONG_ID)) is not None
            or render(_conversation(arguments, best.no_content)) is None,
        )

    def check(self, message: Mapping[str, Any], path: str) -> None:
        """Check the size of the arguments. path: name of the message in the client's body. Raises RequestError."""
        for number, call in enumerate(message.get("tool_calls", ()) if self.has_objects else ()):
            check_size(call["function"]["arguments"], f"{path}.tool_calls[{number}].function.arguments")

    def convert(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of checked messages in this form."""
        copies = [dict(message) for message in messages]
        for message in copies:
            calls, content = message.get("tool_calls"), message["content"]
            if calls:
                message["tool_calls"] = [self._call(call) for call in calls]
            if not self.takes_any_id and message["role"] == "tool":
                message["tool_call_id"] = _nine(message.get("tool_call_id"))
            if content is None or (calls and not content.strip()):
                message["content"] = self.no_content if calls else ""
        return copies

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        text = function["arguments"]
        value = object_or_none(text)
        if value is None and self.takes_text:
            function["arguments"] = text
        elif self.has_objects:
            function["arguments"] = value or {}
        elif not value:
            function["arguments"] = "{}"
        return {**call, **({} if self.takes_any_id else {"id": _nine(call.get("id"))}), "function": function}


def _nine(id: str | None) -> str:
    """Return the id if it has nine alphanumerics, else nine alphanumerics derived from it."""
    if id and len(id) == len(_NINE) and id.isascii() and id.isalnum():
        return id
    digest = hashlib.sha256((id or "").encode(errors="replace")).digest()
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[: len(_NINE)])


def _how_well(text: str | None) -> tuple[bool, bool, bool, int]:
    """Return the sort key of a rendering: accepted, call printed, no Python syntax, few `None`."""
    rendered = text or ""
    return text is not None, "probe" in rendered, _AS_PYTHON not in rendered, -rendered.count("None")


def _conversation(arguments: Any, content: str | None, *, id: str = _NINE) -> list[dict[str, Any]]:
    call = {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "c", "tool_call_id": id, "name": "f"},
    ]
