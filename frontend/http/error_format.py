"""How an endpoint tells of errors: what differs between the APIs that the HTTP door speaks."""

from __future__ import annotations

from typing import Any, Protocol


class ErrorForm(Protocol):
    """Of one request, for the one error that it hears of."""

    def whole(self, error: BaseException) -> tuple[int, dict[str, Any]]:
        """Status and body of an answer that is nothing but the error."""
        ...

    def http(self, status: int, *, phrase: str, message: str) -> dict[str, Any]:
        """The body of what HTTP itself calls wrong. phrase: that of the status."""
        ...

    def event(self, error: BaseException) -> tuple[str, dict[str, Any]]:
        """The last event of a stream that has begun: its name, empty where it has none, and its data."""
        ...
