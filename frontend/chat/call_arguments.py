"""Tool call arguments of clients: JSON text, which a model may have left incomplete."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from core.types.errors import RequestError

_MAX_VALUES = 2**12  # per call
_MAX_CHARS = 2**18
# Matches strings in possibly invalid JSON, up to the closing quote or the end. Possessive, so that it is linear.
_STRING = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)


def object_of(text: str, param: str) -> dict[str, Any]:
    """Parse a JSON object sent by a client; empty text counts as an empty object. Raises RequestError."""
    check_size(text, param)
    if (value := object_or_none(text)) is None:
        raise RequestError(f"{param}: must be a JSON object, encoded as a string", param=param)
    return value


def check_size(text: str, param: str) -> None:
    """Check the bounds of a JSON object. Raises RequestError."""
    if len(text) > _MAX_CHARS:
        raise RequestError(f"{param}: at most {_MAX_CHARS} characters are accepted", param=param)
    bare = _STRING.sub("", text)
    if sum(map(bare.count, ",[{")) > _MAX_VALUES:
        raise RequestError(f"{param}: at most {_MAX_VALUES} values are accepted", param=param)


def object_or_none(text: str) -> dict[str, Any] | None:
    """Return a JSON object, or None for other text. Empty text and null count as an empty object."""
    try:
        value = json.loads(text, parse_constant=_reject, parse_float=_finite) if text.strip() else {}
        if "\\u" in text:  # reject lone surrogates
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return {} if value is None else value if isinstance(value, dict) else None


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number} exceeds the range of a number")
    return value


def _reject(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
