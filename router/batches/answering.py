"""How a batch's lines are answered: by this router's own door, as if their client had asked there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from router.access.client import Client


@dataclass(frozen=True, kw_only=True)
class LineAnswer:
    """What the door has answered."""

    status: int  # HTTP's
    request_id: str
    body: bytes  # JSON
    retry_after_s: float | None = None  # where it was refused for now
    is_lost: bool = False  # what serves it has failed, and another try may do better


class LineDoor(Protocol):
    """The endpoints that a batch may be for."""

    @property
    def model(self) -> str: ...

    @property
    def endpoints(self) -> Collection[str]: ...

    async def answer(self, endpoint: str, body: bytes, client: Client) -> LineAnswer:
        """Cancelled, it ends the work. Raises nothing of the request's own."""
        ...
