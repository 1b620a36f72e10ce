"""The two files of `cluster batch`: OpenAI batch lines to read, and answers to append."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from core.types.errors import SpecError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")

_RECORD = b'{"id": "batch_req_'  # the first bytes of every line that this command writes
_FIX = "name another file, or remove this one"


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def parse_line(line: bytes) -> BatchRequest:
    """Return the request of one line. Raises ValueError with the field and the fix."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object with custom_id, method, url and body")
    custom_id, url, body = fields.get("custom_id"), fields.get("url"), fields.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id: must be a string of at least one character")
    if fields.get("method") != "POST":
        raise ValueError(f"method: must be POST, not {fields.get('method')!r}")
    if url not in ENDPOINTS:
        raise ValueError(f"url: must be one of {', '.join(ENDPOINTS)}, not {url!r}")
    if not isinstance(body, dict):
        raise ValueError("body: must be a JSON object")
    if body.get("stream"):
        raise ValueError("body.stream: must be false; an answer is one JSON object")
    return BatchRequest(custom_id, url, body)


def scan(requests: BinaryIO) -> Iterator[tuple[int, str | ValueError]]:
    """Yield each line's number with its custom_id, or with the error of a malformed line. Blank lines are skipped."""
    first_seen: dict[str, int] = {}
    for number, line in enumerate(requests, 1):
        if not line.strip():
            continue
        try:
            custom_id = parse_line(line).custom_id
            if (first := first_seen.setdefault(custom_id, number)) != number:
                raise ValueError(f"custom_id: {custom_id!r} is a duplicate of line {first}")
        except ValueError as error:
            yield number, error
        else:
            yield number, custom_id


def record(custom_id: str | None, *, request_id: str, response: dict[str, Any] | None, error: str | None) -> bytes:
    """Return one line of OpenAI's batch output."""
    fields = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": {"message": error} if error is not None else None,
    }
    return json.dumps(fields).encode() + b"\n"


def open_output(path: Path) -> tuple[BinaryIO, set[str]]:
    """Open the answers for appending, and return them with the custom_ids answered already.

    A process that was killed may leave a part of its last line; this removes it. The file stays locked until closed, so
    that two commands cannot mix their answers. Raises SpecError.
    """
    try:
        output = path.open("a+b")
    except OSError as error:
        raise SpecError(f"--output {path}: {error.strerror}") from None
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return output, _repair(output, path)
    except BlockingIOError:
        output.close()
        raise SpecError(f"--output {path}: another `cluster batch` is writing to it; wait for its end") from None
    except BaseException:
        output.close()
        raise


def _repair(output: BinaryIO, path: Path) -> set[str]:
    answered: set[str] = set()
    size = 0  # bytes in the lines before
    output.seek(0)
    for number, line in enumerate(output, 1):
        if not line.endswith(b"\n") and (_RECORD.startswith(line) or line.startswith(_RECORD)):
            output.truncate(size)
            break
        try:
            custom_id = json.loads(line)["custom_id"] if line.startswith(_RECORD) else None
        except (ValueError, KeyError):
            custom_id = None
        if not isinstance(custom_id, str):
            raise SpecError(f"--output {path}:{number}: not an answer of `cluster batch`; {_FIX}")
        answered.add(custom_id)
        size += len(line)
    return answered
