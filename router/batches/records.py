"""What is kept of a file and of a batch, and how a client sees them: in the form that OpenAI has published."""

from __future__ import annotations

from typing import Any

import msgspec

JSON = dict[str, Any]

INPUT, OUTPUT = "batch", "batch_output"  # what a file is for
WINDOW = "24h"  # the only one that there is
ENDED = ("failed", "completed", "expired", "cancelled")


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A file whose parts are all there."""

    id: str
    name: str
    purpose: str
    num_bytes: int
    num_parts: int
    created_at: int  # unix seconds
    expires_at: int

    def published(self) -> JSON:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


class BatchMade(msgspec.Struct, frozen=True, kw_only=True):
    """What never changes about a batch."""

    id: str
    tenant: str
    key_id: str  # of the API key that made it, and whose limits it counts for; empty: none
    endpoint: str
    input_file_id: str
    output_file_id: str  # where answers go from the first one on; clients hear of it at the end
    error_file_id: str
    created_at: int  # unix seconds
    expires_at: int
    metadata: dict[str, str] | None = None


class BatchProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a batch, or a line of it, cannot be done."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None  # of the input file, from 1


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """How far it has come, by the word of who works on it."""

    status: str = "validating"
    num_lines: int = 0
    times: dict[str, int] = {}  # unix seconds, by OpenAI's names
    problems: list[BatchProblem] = []
    has_output: bool = False
    has_errors: bool = False
    model: str = ""

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as it stands in the store."""

    made: BatchMade
    state: BatchState
    num_completed: int
    num_failed: int
    cancelling_at: int | None = None  # unix seconds; None: nobody has asked for that

    @property
    def status(self) -> str:
        is_cancelling = self.cancelling_at is not None and not self.state.is_ended
        return "cancelling" if is_cancelling else self.state.status

    def published(self) -> JSON:
        made, state = self.made, self.state
        times = dict.fromkeys(_TIMES) | state.times
        if self.cancelling_at is not None and state.status in ("validating", "in_progress", "cancelled"):
            times["cancelling_at"] = self.cancelling_at
        problems = [msgspec.to_builtins(problem) for problem in state.problems]
        return {
            "id": made.id,
            "object": "batch",
            "endpoint": made.endpoint,
            "model": state.model or None,
            "errors": {"object": "list", "data": problems} if problems else None,
            "input_file_id": made.input_file_id,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": made.output_file_id if state.has_output else None,
            "error_file_id": made.error_file_id if state.has_errors else None,
            "created_at": made.created_at,
            "expires_at": made.expires_at,
            **times,
            "request_counts": {
                "total": state.num_lines,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": made.metadata,
        }


_TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
