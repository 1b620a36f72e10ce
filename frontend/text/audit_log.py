"""Audit log of requests: one line of JSON for each, whatever its outcome, and never any of its text.

Separate from the process log, which is for debugging and is discarded.
"""

from __future__ import annotations

import json
import logging
import os
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from core.types.api_key import ApiKey
from core.types.errors import ClusterError, RequestError, outcome_of
from frontend.text.completion_request import CompletionRequest
from frontend.text.events import TokenUsage

_MAX_BYTES, _NUM_BACKUPS = 64 * 2**20, 4


class RequestAuditLog:
    """Rotating audit log file, readable by its owner only. Without a path it writes nothing."""

    def __init__(self, path: Path | None = None, *, max_bytes: int = _MAX_BYTES) -> None:
        """max_bytes: size at which the file rotates to path.1, and so on to path.4."""
        self._logger = logging.Logger("audit_log")
        if path is None:
            self._logger.disabled = True
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_private(path)
        handler = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=_NUM_BACKUPS, encoding="utf-8")
        handler.rotator = _rotate
        handler.setFormatter(logging.Formatter("%(message)s"))
        self._logger.addHandler(handler)

    def done(
        self, request: CompletionRequest, outcome: str, usage: TokenUsage, *, max_tokens: int, s: float, ttft_s: float
    ) -> None:
        """Record a request that was admitted and has ended."""
        self._write(
            **_client_fields(request),
            outcome=outcome,
            n=request.num_choices,
            max_tokens=max_tokens,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            ms=round(s * 1e3, 1),
            ttft_ms=round(ttft_s * 1e3, 1),
        )

    def rejected(self, request: CompletionRequest, error: ClusterError) -> None:
        """Record a request that was rejected."""
        self._write(**_client_fields(request), **_error_fields(error))

    def unreadable(self, request_id: str, error: ClusterError, *, key: ApiKey | None, peer: str) -> None:
        """Record an unreadable request. Omits the field name, which may be the client's own text."""
        key_id, tenant = (key.id, key.tenant) if key else ("", "")
        self._write(request=request_id, key=key_id, tenant=tenant, peer=peer, outcome=outcome_of(error).code)

    def close(self) -> None:
        for handler in self._logger.handlers:
            handler.close()

    def _write(self, **fields: Any) -> None:
        if not self._logger.disabled:
            self._logger.info("%s", json.dumps({"time": round(time.time(), 3), **fields}, ensure_ascii=True))


def _make_private(path: str | Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))


def _rotate(source: str, to: str) -> None:
    """Rotate the file, and create the next one as private; the handler would create it readable by all."""
    os.rename(source, to)
    _make_private(source)


def _client_fields(request: CompletionRequest) -> dict[str, str]:
    return {"request": request.id, "key": request.key_id, "tenant": request.tenant, "peer": request.peer}


def _error_fields(error: ClusterError) -> dict[str, str | None]:
    param = error.param if isinstance(error, RequestError) else None
    return {"outcome": outcome_of(error).code, "param": param}
