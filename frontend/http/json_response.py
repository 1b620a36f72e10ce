"""JSON encoding and responses, common to all HTTP APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

JSON = dict[str, Any]

to_json = msgspec.json.Encoder().encode


def json_answer(content: object, headers: Mapping[str, str]) -> Response:
    return Response(to_json(content), media_type="application/json", headers=dict(headers))
