"""OpenAI's error format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

from core.types.errors import ClusterError, RequestError, outcome_of
from frontend.http.event_stream import COMMENT, data

logger = logging.getLogger(__name__)


class OpenAIErrors:
    """OpenAI's error format, the default of all endpoints."""

    keepalive = COMMENT

    def whole(self, error: BaseException) -> tuple[int, dict[str, Any]]:
        return outcome_of(error).http, error_body(error)

    def http(self, status: int, *, phrase: str, message: str) -> dict[str, Any]:
        return http_error(phrase, message)

    def events(self, error: BaseException) -> bytes:
        return data(error_body(error))


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the error object. An unexpected exception is logged, and its text withheld."""
    outcome = outcome_of(error)
    if not isinstance(error, ClusterError):
        logger.error("request failed with an unexpected exception", exc_info=error)
        return _body("internal error; see the router's log", type=outcome.type, code=outcome.code)
    param = error.param if isinstance(error, RequestError) else None
    return _body(str(error), type=outcome.type, code=outcome.code, param=param)


def http_error(phrase: str, message: str) -> dict[str, Any]:
    """Return the error object of an HTTP-level error. phrase: reason phrase of the status."""
    return _body(message, type="invalid_request_error", code=phrase.lower().replace(" ", "_"))


def _body(message: str, *, type: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
