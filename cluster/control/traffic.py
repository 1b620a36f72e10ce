"""Traffic of the last minutes, as reported by the routers, and its capture to a file.

A capture holds hashes, lengths and times, for `cluster bench`, `simulate`, `plan` and `autoscale replay`. Block hashes
are hashed again with a salt that is never stored. So captures cannot be compared with each other, and not even the
deployment can test whether a prompt is among the captured ones.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import TypedDict

from core.trace.traffic import KEPT_S, ReplicaReport, SeenRequest, TrafficReport

logger = logging.getLogger(__name__)

_MAX_REQUESTS = 100_000
_MAX_IDS = 4_000_000
# Age limit of a router's report about replicas.
_FRESH_S = 30.0
# Bytes of a captured hash. JSON readers represent such integers exactly.
_ID_BYTES = 6


class TrafficLog:
    """Bounded log of recent requests, on the controller's event loop.

    A restarted controller has a new `life`; routers that see it resend all that they remember.
    """

    def __init__(self, *, now: Callable[[], float] = monotonic) -> None:
        self.life = secrets.token_hex(8)
        # Called once for each finished request.
        self.ended: Callable[[SeenRequest], None] = ignore
        self._now = now
        self._requests: dict[tuple[str, int], SeenRequest] = {}
        self._num_ids = 0
        # Last report of each router, with its time of arrival.
        self._reports: dict[str, tuple[float, TrafficReport]] = {}

    def note(self, report: TrafficReport) -> str:
        """Merge a router's report. Returns the `life` of this log."""
        now = self._now()
        for number, seen in {**report.arrived, **report.changed}.items():
            key = (report.router, number)
            seen.arrival_s = now - seen.arrival_s
            before = self._requests.get(key)
            if before is None:
                self._num_ids += len(seen.ids or ())
            else:
                # A repeated report may arrive a little later; keep the first time.
                seen.arrival_s = before.arrival_s
            self._requests[key] = seen
            if seen.is_over and not (before and before.is_over):
                self.ended(seen)
        self._reports[report.router] = (now, report)
        self._forget(now)
        return self.life

    def recent(self) -> list[SeenRequest]:
        """Return requests in order of arrival, by time.monotonic() of this process."""
        self._forget(self._now())
        return sorted(self._requests.values(), key=lambda seen: seen.arrival_s)

    @property
    def replicas(self) -> list[ReplicaReport]:
        """Replicas as seen by the router that reported last."""
        fresh = self._fresh()
        return list(fresh[-1].replicas) if fresh else []

    @property
    def num_waiting(self) -> int:
        return sum(report.num_waiting for report in self._fresh())

    def _fresh(self) -> list[TrafficReport]:
        now = self._now()
        reports = sorted(self._reports.values(), key=lambda one: one[0])
        return [report for when, report in reports if now - when <= _FRESH_S]

    def _forget(self, now: float) -> None:
        is_full = len(self._requests) > _MAX_REQUESTS or self._num_ids > _MAX_IDS
        oldest = min((seen.arrival_s for seen in self._requests.values()), default=now)
        if not is_full and now - oldest <= KEPT_S:
            return
        in_order = sorted(self._requests.items(), key=lambda item: item[1].arrival_s)
        for key, first in in_order:
            is_full = len(self._requests) > _MAX_REQUESTS or self._num_ids > _MAX_IDS
            if not is_full and now - first.arrival_s <= KEPT_S:
                break
            del self._requests[key]
            self._num_ids -= len(first.ids or ())
        self._reports = {router: one for router, one in self._reports.items() if now - one[0] <= KEPT_S}


def ignore(seen: SeenRequest) -> None:
    """Record nothing: no capture is running."""


class CaptureReport(TypedDict):
    seconds: float  # since the start
    requests: int
    bytes: int
    # The capture stopped at its size limit or on a full disk.
    is_full: bool


class TrafficCapture:
    """One capture, written to a new file with mode 0600, on the controller's event loop."""

    def __init__(self, path: Path, *, begin_s: float, max_bytes: int = 256 * 2**20) -> None:
        """begin_s: start of the capture, on the clock of SeenRequest.arrival_s; earlier requests are left out."""
        self.path = path
        self._begin_s = begin_s
        self._max_bytes = max_bytes
        self._salt = secrets.token_bytes(32)
        self._num_requests = 0
        self._num_bytes = 0
        self._is_full = False
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # An existing file may come from an earlier run of the controller, be a link, or be readable by others.
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def note(self, seen: SeenRequest) -> None:
        """Record a finished request."""
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
        """Return part of the file as written so far."""
        with self.path.open("rb") as file:
            file.seek(begin)
            return file.read(num_bytes)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def _is_written(self, line: bytes) -> bool:
        """Append one line. Returns False on a full disk, which ends the capture but not the traffic report."""
        why = "disk full"
        try:
            if self._file.write(line) == len(line):
                return True
        except OSError as error:
            why = str(error)
        logger.error("traffic capture ended bytes=%d path=%s reason=%s", self._num_bytes, self.path, why)
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


def capture_file(log_dir: str) -> Path:
    """Return the path of the capture's file on the head, next to the audit log."""
    return Path(log_dir).parent / "audit_log" / "capture.jsonl"
