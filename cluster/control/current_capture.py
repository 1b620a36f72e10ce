"""The traffic capture of a deployment; at most one runs at a time."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from cluster.control.traffic_capture import CaptureReport, TrafficCapture
from cluster.control.traffic_log import TrafficLog
from core.types.errors import SpecError


class CurrentCapture:
    """Owner of the running capture, on the controller's event loop. A restart of the controller ends the capture."""

    def __init__(self, traffic_log: TrafficLog) -> None:
        """traffic_log: calls back for each finished request; arrival times are time.monotonic() of this process."""
        self._traffic_log = traffic_log
        self._capture: TrafficCapture | None = None

    def start(self, log_dir: str, *, max_bytes: int) -> None:
        """Start a capture to a file next to the audit log, on the head. Raises SpecError if one is running."""
        if self._capture:
            raise SpecError("a capture is under way; end it by `cluster capture stop -o FILE`")
        self._capture = TrafficCapture(_path(log_dir), begin_s=monotonic(), max_bytes=max_bytes)
        self._traffic_log.ended = self._capture.note

    def report(self) -> CaptureReport | None:
        """Return the state of the running capture, or None."""
        return self._capture.report(monotonic()) if self._capture else None

    def read(self, begin: int, num_bytes: int) -> bytes:
        """Return part of the capture's file. Raises SpecError if no capture is running."""
        if self._capture is None:
            raise SpecError("no capture is under way; begin one by `cluster capture start`")
        return self._capture.read(begin, num_bytes)

    def stop(self) -> None:
        """Stop the capture and delete its file."""
        if self._capture:
            self._traffic_log.ended = lambda seen: None
            self._capture.remove()
            self._capture = None


def remove_stale_capture(log_dir: str) -> None:
    """Delete the capture file of an earlier run of the controller; its capture cannot continue."""
    _path(log_dir).unlink(missing_ok=True)


def _path(log_dir: str) -> Path:
    return Path(log_dir).parent / "audit_log" / "capture.jsonl"
