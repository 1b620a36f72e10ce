"""The capture of a deployment's traffic that is under way, if there is one; there is never a second."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from cluster.control.traffic_capture import CaptureReport, TrafficCapture
from cluster.control.traffic_log import TrafficLog
from core.types.errors import SpecError


class CurrentCapture:
    """Lives on the controller's event loop, and with that one: a controller that restarts has none."""

    def __init__(self, traffic_log: TrafficLog) -> None:
        """book: by whose clock, time.monotonic, requests arrive; it tells of those that are over."""
        self._traffic_log = traffic_log
        self._capture: TrafficCapture | None = None

    def start(self, log_dir: str, *, max_bytes: int) -> None:
        """To a file beside the trail, on the head. Raises SpecError while there is one already."""
        if self._capture:
            raise SpecError("a capture is under way; end it by `cluster capture stop -o FILE`")
        self._capture = TrafficCapture(_path(log_dir), begin_s=monotonic(), max_bytes=max_bytes)
        self._traffic_log.ended = self._capture.note

    def report(self) -> CaptureReport | None:
        """None: there is none."""
        return self._capture.report(monotonic()) if self._capture else None

    def read(self, begin: int, num_bytes: int) -> bytes:
        """Of its file. Raises SpecError where there is none."""
        if self._capture is None:
            raise SpecError("no capture is under way; begin one by `cluster capture start`")
        return self._capture.read(begin, num_bytes)

    def stop(self) -> None:
        """It is over, and its file is removed."""
        if self._capture:
            self._traffic_log.ended = lambda seen: None
            self._capture.remove()
            self._capture = None


def remove_an_earlier_ones(log_dir: str) -> None:
    """The file of an earlier life of the controller, whose capture cannot go on."""
    _path(log_dir).unlink(missing_ok=True)


def _path(log_dir: str) -> Path:
    return Path(log_dir).parent / "audit_log" / "capture.jsonl"
