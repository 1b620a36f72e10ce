"""Format of errors and keep-alives of one API, such as OpenAI's or Anthropic's."""

from __future__ import annotations

from typing import Any, Protocol


class ErrorForm(Protocol):
    """Formats the error of one request, and the keep-alives of its stream."""

    keepalive: bytes  # sent while a stream has nothing else to send

    def whole(self, error: BaseException) -> tuple[int, dict[str, Any]]:
        """Return status and body of an error response."""
        ...

    def http(self, status: int, *, phrase: str, message: str) -> dict[str, Any]:
        """Return the body for an HTTP-level error. phrase: reason phrase of the status."""
        ...

    def events(self, error: BaseException) -> bytes:
        """Return the events that report `error` and end a started stream."""
        ...
