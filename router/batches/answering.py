"""How a batch's lines are answered: by this router's own door, as if their client had asked there; and written."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from frontend.access.identity import Client
from router.batches.lines import AskedLine

# JSON may have these as they are; to Python's splitlines, by which clients read such a file, each ends a line.
_LINE_ENDS = {end.encode(): b"\\u%04x" % ord(end) for end in "\x85\u2028\u2029"}


@dataclass(frozen=True, kw_only=True)
class LineAnswer:
    """What the door has answered."""

    status: int  # HTTP's
    request_id: str
    body: bytes  # JSON
    retry_after_s: float | None = None  # where it was refused for now: full, or its model is away
    is_lost: bool = False  # what serves it has failed, and another try may do better


class LineEndpoint(Protocol):
    """The endpoints that a batch may be for."""

    @property
    def models(self) -> Sequence[str]:
        """Those that are served, or are to be; the first is meant where a line names none."""
        ...

    @property
    def endpoints(self) -> Collection[str]: ...

    async def answer(self, endpoint: str, body: bytes, client: Client) -> LineAnswer:
        """Cancelled, it ends the work. Raises nothing of the request's own."""
        ...


def answer_line(line: AskedLine, answer: LineAnswer) -> bytes:
    """Of an output or an error file."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    return _line(line, response, None)


def error_line(line: AskedLine, code: str, message: str) -> bytes:
    """Of a request that was not made."""
    return _line(line, None, {"code": code, "message": message})


def _line(line: AskedLine, response: object, error: object) -> bytes:
    id = f"batch_req_{secrets.token_hex(16)}"
    written = {"id": id, "custom_id": line.custom_id, "response": response, "error": error}
    text = msgspec.json.encode(written)
    for end, escaped in _LINE_ENDS.items():
        text = text.replace(end, escaped)
    return text + b"\n"
