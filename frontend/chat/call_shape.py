"""Form in which a chat template expects tool calls, and the arguments of clients' calls.

Templates deviate from transformers' form, so each template is probed. Arguments are JSON text, which a model may have
left incomplete.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from core.types.errors import RequestError
from frontend.parsers.formats import named_id

_ARGUMENTS = {"probe": "b"}
_AS_PYTHON = "{'probe'"
_BROKEN = '{"probe": '
_NAME = "shape_5e0c"
_LONG_ID, _NINE = "call_4f0a-1b2c3d4e5f60718293a4", "callnine1"
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class CallShape:
    """Form of tool calls for one template."""

    has_objects: bool = True  # arguments are objects; False: JSON text
    takes_text: bool = True  # arguments may be text instead of a JSON object
    takes_any_id: bool = True  # False: ids have nine alphanumerics, as in Mistral's templates
    takes_named_ids: bool = False  # ids stand for the names of calls, as in Kimi K2's templates
    no_content: str | None = None  # content of a message that has only calls

    @classmethod
    def of(cls, render: Callable[[Sequence[Mapping[str, Any]]], str | None]) -> CallShape:
        """Return the form that the template renders best. render: returns None if the template rejects the messages."""
        shapes = [cls(has_objects, no_content=content) for has_objects, content in product((True, False), (None, ""))]
        best = max(shapes, key=lambda shape: _how_well(render(shape._probe())))
        broken, called = render(_conversation(_BROKEN, best.no_content)), render(best._probe()[:2]) or ""
        return replace(
            best,
            takes_text=not best.has_objects or "probe" in (broken or ""),
            takes_any_id=render(best._probe(id=_LONG_ID)) is not None or render(best._probe()) is None,
            takes_named_ids=(_NINE in called and _NAME not in called) or named_id(_NAME, 0) in called,
        )

    def _probe(self, *, id: str = _NINE) -> list[dict[str, Any]]:
        return _conversation(_ARGUMENTS if self.has_objects else json.dumps(_ARGUMENTS), self.no_content, id=id)

    def check(self, message: Mapping[str, Any], path: str) -> None:
        """Check the size of the arguments. path: name of the message in the client's body. Raises RequestError."""
        for number, call in enumerate(message.get("tool_calls", ()) if self.has_objects else ()):
            check_size(call["function"]["arguments"], f"{path}.tool_calls[{number}].function.arguments")

    def convert(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of checked messages in this form."""
        copies = [dict(message) for message in messages]
        ids, num_calls = dict[str | None, str | None](), 0  # by the client's ids
        for message in copies:
            calls, content = message.get("tool_calls", ()), message["content"]
            if calls:
                own = [self._id(call, number) for number, call in enumerate(calls, num_calls)]
                num_calls += len(calls)
                ids |= zip((call.get("id") for call in calls), own, strict=True)
                message["tool_calls"] = [self._call(call, id) for call, id in zip(calls, own, strict=True)]
            if message["role"] == "tool" and self._changes_ids:
                id = message.get("tool_call_id")
                message["tool_call_id"] = ids.get(id, id) if self.takes_any_id else _nine(id)
            if content is None or (calls and not content.strip()):
                message["content"] = self.no_content if calls else ""
        return copies

    @property
    def _changes_ids(self) -> bool:
        return self.takes_named_ids or not self.takes_any_id

    def _id(self, call: Mapping[str, Any], number: int) -> str | None:
        """Return a call's id. number: index of the call in the conversation."""
        id: str | None = call.get("id")
        if self.takes_named_ids:
            new = named_id(call["function"]["name"], number)
            return id if id and id.rpartition(":")[0] == new.rpartition(":")[0] else new
        return id if self.takes_any_id else _nine(id)

    def _call(self, call: Mapping[str, Any], id: str | None) -> dict[str, Any]:
        function = dict(call["function"])
        text = function["arguments"]
        value = object_or_none(text)
        if value is None and self.takes_text:
            function["arguments"] = text
        elif self.has_objects:
            function["arguments"] = value or {}
        elif not value:
            function["arguments"] = "{}"
        return {**call, **({"id": id} if self._changes_ids else {}), "function": function}


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
    call = {"id": id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "c", "tool_call_id": id, "name": _NAME},
    ]


_MAX_VALUES = 2**12  # per call
_MAX_CHARS = 2**18
# Matches strings in possibly invalid JSON, up to the closing quote or the end. Possessive, so that it is linear.
_STRING = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)


def object_of(text: str, param: str) -> dict[str, Any]:
    """Parse a JSON object sent by a client; empty text counts as an empty object. Raises RequestError."""
    check_size(text, param)
    if (value := object_or_none(text)) is None:
        raise RequestError.at(param, "must be a JSON object, encoded as a string")
    return value


def check_size(text: str, param: str) -> None:
    """Check the bounds of a JSON object. Raises RequestError."""
    if len(text) > _MAX_CHARS:
        raise RequestError.at(param, f"at most {_MAX_CHARS} characters are accepted")
    bare = _STRING.sub("", text)
    if sum(map(bare.count, ",[{")) > _MAX_VALUES:
        raise RequestError.at(param, f"at most {_MAX_VALUES} values are accepted")


def object_or_none(text: str) -> dict[str, Any] | None:
    """Return a JSON object, or None for other text. Empty text and null count as an empty object."""
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite) if text.strip() else {}
        if "\\u" in text:  # reject lone surrogates
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return {} if value is None else value if isinstance(value, dict) else None


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is not JSON, or exceeds the range of a number")
    return value
