"""JSON encoding and responses, common to all HTTP APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

JSON = dict[str, Any]

_encode = msgspec.json.Encoder().encode
# Valid in JSON as they are, but clients that split a stream into lines as Unicode does would cut an event in two.
_LINE_ENDS = tuple((char.encode(), json.dumps(char).strip('"').encode()) for char in "\x85\u2028\u2029")


def to_json(content: object) -> bytes:
    """Encode as one line, by the rules of JSON as well as of Unicode."""
    encoded = _encode(content)
    if encoded.isascii():
        return encoded
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded


def json_answer(content: object, headers: Mapping[str, str]) -> Response:
    return Response(to_json(content), media_type="application/json", headers=dict(headers))
