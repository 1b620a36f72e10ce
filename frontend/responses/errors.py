"""Errors of /v1/responses: OpenAI's format, with this API's field names."""

from __future__ import annotations

import re
from typing import Any

from core.types.errors import RequestError, UnsupportedField, outcome_of
from frontend.http.event_stream import COMMENT
from frontend.openai.errors import OpenAIErrors, error_body
from frontend.responses.answer import ResponseAnswer

# Fields of a chat and their names in this API. An index after `messages` is dropped: it does not count items.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_OF_CHAT = re.compile(rf"({'|'.join(_NAMES)})\b[\w.\[\]]*")


class ResponsesErrors:
    """Error format for one request; implements ErrorForm."""

    keepalive = COMMENT

    def __init__(self, answer: ResponseAnswer | None = None) -> None:
        """answer: the response being streamed, if any."""
        self._answer = answer

    def whole(self, error: BaseException) -> tuple[int, dict[str, Any]]:
        return outcome_of(error).http, error_body(_named(error))

    def http(self, status: int, *, phrase: str, message: str) -> dict[str, Any]:
        return OpenAIErrors().http(status, phrase=phrase, message=message)

    def events(self, error: BaseException) -> bytes:
        assert self._answer
        return self._answer.failed(error)


def _named(error: BaseException) -> BaseException:
    """Return the error with this API's field name."""
    if not isinstance(error, RequestError) or not (found := _OF_CHAT.match(error.param or "")):
        return error
    if isinstance(error, UnsupportedField) and error.param in _NAMES:
        return error  # the client used the chat's name
    return type(error)(_OF_CHAT.sub(_name, str(error), count=1), param=_NAMES[found[1]])


def _name(found: re.Match[str]) -> str:
    return _NAMES[found[1]]
