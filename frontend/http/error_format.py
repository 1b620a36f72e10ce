"""Error format of one API, such as OpenAI's or Anthropic's."""

from __future__ import annotations

from typing import Any, Protocol


class ErrorForm(Protocol):
    """Formats the error of one request."""

    def whole(self, error: BaseException) -> tuple[int, dict[str, Any]]:
        """Return status and body of an error response."""
        ...

    def http(self, status: int, *, phrase: str, message: str) -> dict[str, Any]:
        """Return the body for an HTTP-level error. phrase: reason phrase of the status."""
        ...

    def event(self, error: BaseException) -> tuple[str, dict[str, Any]]:
        """Return the last event of a started stream: its name, empty if the API has none, and its data."""
        ...
