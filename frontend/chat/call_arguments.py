"""The arguments of calls in a conversation: from JSON text, as clients send it, to the objects that templates take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from core.types.errors import RequestError

_MAX_VALUES = 2**12  # of one
_MAX_CHARS = 2**18
# Of what may be no JSON: a string goes on to its quote or the end, so that nothing is looked at twice.
_STRING = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)


def as_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages. Raises RequestError that names the call whose arguments are no JSON object."""
    told = [dict(message) for message in messages]
    for number, message in enumerate(told):
        if calls := message.get("tool_calls"):
            path = f"messages[{number}].tool_calls"
            message["tool_calls"] = [_with_object(call, f"{path}[{i}]") for i, call in enumerate(calls)]
    return told


def object_of(text: str, param: str) -> dict[str, Any]:
    """Of JSON text that a client sent; none is an empty one. Raises RequestError."""
    if len(text) > _MAX_CHARS:
        raise RequestError(f"{param}: at most {_MAX_CHARS} characters are taken", param=param)
    bare = _STRING.sub("", text)
    if sum(map(bare.count, ",[{")) > _MAX_VALUES:
        raise RequestError(f"{param}: more than {_MAX_VALUES} values are not taken", param=param)
    try:
        found = json.loads(text) if text.strip() else {}
        if "\\u" in text:  # half of a pair, which is no character
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"{param}: must be a JSON object, written as a string", param=param)
    return found


def _with_object(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    function = call["function"]
    arguments = object_of(function["arguments"], f"{path}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}
