"""Live traffic to a file that `cluster bench`, `simulate`, `plan` and `autoscale replay` read: hashes, lengths, times.

The hashes are keyed once more, by a salt that the file has for itself and that nobody keeps: so two captures cannot be
compared, and nobody, the deployment included, can try whether a prompt is among what was captured.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from hashlib import blake2b
from pathlib import Path
from typing import TypedDict

from core.trace.traffic import SeenRequest

logger = logging.getLogger(__name__)

MAX_BYTES = 256 * 2**20
_ID_BYTES = 6  # whole numbers that every reader of JSON has


class CaptureReport(TypedDict):
    seconds: float  # since it began
    requests: int
    bytes: int
    is_full: bool  # it has ended at its limit, or at the disk's


class TrafficCapture:
    """One capture, to a file of its own that only its owner can read. Lives on the controller's event loop."""

    def __init__(self, path: Path, *, begin_s: float, max_bytes: int = MAX_BYTES) -> None:
        """begin_s: of the clock by which requests arrive; what came before is left out."""
        self.path = path
        self._begin_s = begin_s
        self._max_bytes = max_bytes
        self._salt = secrets.token_bytes(32)
        self._num_requests = 0
        self._num_bytes = 0
        self._is_full = False
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)  # of an earlier life of the controller; or a link, or open to others
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def note(self, seen: SeenRequest) -> None:
        """A request is over."""
        if self._is_full or seen.arrival_s < self._begin_s:
            return
        line = json.dumps(self._row(seen)).encode() + b"\n"
        if self._num_bytes + len(line) > self._max_bytes or not self._is_written(line):
            self._is_full = True
            return
        self._num_bytes += len(line)
        self._num_requests += 1

    def report(self, now_s: float) -> CaptureReport:
        return {
            "seconds": now_s - self._begin_s,
            "requests": self._num_requests,
            "bytes": self._num_bytes,
            "is_full": self._is_full,
        }

    def read(self, begin: int, num_bytes: int) -> bytes:
        """Of what was written so far."""
        with self.path.open("rb") as file:
            file.seek(begin)
            return file.read(num_bytes)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def _is_written(self, line: bytes) -> bool:
        """A disk that is full ends the capture, not what tells of traffic."""
        why = "no room for a whole line"
        try:
            if self._file.write(line) == len(line):
                return True
        except OSError as error:
            why = str(error)
        logger.error("the capture of traffic ends at %d bytes: %s: %s", self._num_bytes, self.path, why)
        with contextlib.suppress(OSError):
            self._file.truncate(self._num_bytes)
        return False

    def _row(self, seen: SeenRequest) -> dict[str, object]:
        return {
            "timestamp": round((seen.arrival_s - self._begin_s) * 1e3, 1),
            "input_length": seen.num_tokens,
            "output_length": seen.num_output,
            "hash_ids": [self._id(id) for id in seen.ids or ()],
            "tokens_per_id": seen.tokens_per_id,
            "ttft_ms": seen.ttft_s and round(seen.ttft_s * 1e3, 1),
            "itl_ms": seen.itl_s and round(seen.itl_s * 1e3, 2),
        }

    def _id(self, id: int) -> int:
        digest = blake2b(id.to_bytes(8, "little"), key=self._salt, digest_size=_ID_BYTES).digest()
        return int.from_bytes(digest, "little")
