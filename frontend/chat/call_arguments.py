"""Conversion of tool call arguments in a conversation from JSON text to objects, for chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from core.types.errors import RequestError

_MAX_VALUES = 2**12  # per call
_MAX_CHARS = 2**18
# Matches strings in possibly invalid JSON, up to the closing quote or the end. Possessive, so that it is linear.
_STRING = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)


def as_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the messages. Raises RequestError with the call whose arguments are not a JSON object."""
    copies = [dict(message) for message in messages]
    for number, message in enumerate(copies):
        if calls := message.get("tool_calls"):
            path = f"messages[{number}].tool_calls"
            message["tool_calls"] = [_with_object(call, f"{path}[{i}]") for i, call in enumerate(calls)]
    return copies


def object_of(text: str, param: str) -> dict[str, Any]:
    """Parse a JSON object sent by a client; empty text counts as an empty object. Raises RequestError."""
    if len(text) > _MAX_CHARS:
        raise RequestError(f"{param}: at most {_MAX_CHARS} characters are accepted", param=param)
    bare = _STRING.sub("", text)
    if sum(map(bare.count, ",[{")) > _MAX_VALUES:
        raise RequestError(f"{param}: at most {_MAX_VALUES} values are accepted", param=param)
    try:
        value = json.loads(text) if text.strip() else {}
        if "\\u" in text:  # reject lone surrogates
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"{param}: must be a JSON object, encoded as a string", param=param)
    return value


def _with_object(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    function = call["function"]
    arguments = object_of(function["arguments"], f"{path}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}
