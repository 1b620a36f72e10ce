"""Anthropic's error format: {"type": "error", "error": {"type", "message"}, "request_id"}, with its status codes.

Source: https://docs.claude.com/en/api/errors
"""

from __future__ import annotations

from typing import Any

from core.types.errors import CapacityError, RateLimited, outcome_of
from frontend.http.event_stream import data
from frontend.openai.errors import error_body

_OVERLOADED = 529  # the cluster is full; 429 is for an API key's limits
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


class AnthropicErrors:
    """Anthropic's error format for one request."""

    keepalive = data({"type": "ping"}, name="ping")

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def whole(self, error: BaseException) -> tuple[int, dict[str, Any]]:
        is_full = isinstance(error, CapacityError) and not isinstance(error, RateLimited)
        status = _OVERLOADED if is_full else outcome_of(error).http
        return status, self._body(status, error_body(error)["error"]["message"])

    def http(self, status: int, *, phrase: str, message: str) -> dict[str, Any]:
        return self._body(status, message)

    def events(self, error: BaseException) -> bytes:
        return data(self.whole(error)[1], name="error")

    def _body(self, status: int, message: str) -> dict[str, Any]:
        type = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": type, "message": message}, "request_id": self._request_id}
