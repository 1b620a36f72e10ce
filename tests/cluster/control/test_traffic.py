"""The controller's traffic log and captures of it."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.control.traffic import TrafficCapture, TrafficLog
from core.trace.trace import read_trace
from core.trace.traffic import SeenRequest, TrafficReport


def _seen(ago_s: float, *, num_tokens: int = 150, ids: tuple[int, ...] = (11, 12, 13), **more: object) -> SeenRequest:
    return SeenRequest(arrival_s=ago_s, num_tokens=num_tokens, ids=ids, **more)  # type: ignore[arg-type]


def _report(
    router: str, arrived: dict[int, SeenRequest], changed: dict[int, SeenRequest] | None = None
) -> TrafficReport:
    return TrafficReport(router=router, arrived=arrived, changed=changed or {})


def test_requests_of_all_routers_are_merged_and_updated() -> None:
    clock = [1000.0]
    book = TrafficLog(now=lambda: clock[0])
    assert book.note(_report("a", {0: _seen(5.0), 1: _seen(1.0)})) == book.life
    book.note(_report("b", {0: _seen(3.0)}))
    assert [seen.arrival_s for seen in book.recent()] == [995.0, 997.0, 999.0]
    clock[0] += 10
    book.note(_report("a", {}, {0: _seen(15.5, num_output=7, ttft_s=0.1, itl_s=0.01)}))
    first = book.recent()[0]
    assert first.arrival_s == 995.0 and first.num_output == 7
    clock[0] += 2000
    assert book.recent() == []


def test_repeated_reports_count_once() -> None:
    book, ended = TrafficLog(now=lambda: 1000.0), []
    book.ended = ended.append
    for _ in range(2):
        book.note(_report("a", {0: _seen(5.0, num_output=7)}))
    assert len(book.recent()) == len(ended) == 1
    assert TrafficLog().life != book.life


@pytest.fixture
def files_end() -> Iterator[None]:
    """Limit files to 2000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _capture(path: Path, rows: list[SeenRequest], **more: int) -> TrafficCapture:
    capture = TrafficCapture(path, begin_s=100.0, **more)
    for seen in rows:
        capture.note(seen)
    capture.close()
    return capture


def test_capture_preserves_shared_prefixes(tmp_path: Path) -> None:
    rows = [
        _seen(104.0, num_output=9, ttft_s=0.2, itl_s=0.01),
        _seen(99.0, num_output=9),  # before the capture began
        _seen(101.0, num_output=4, ids=(11, 12, 99)),
    ]
    capture = _capture(tmp_path / "one" / "capture.jsonl", rows)
    second, first = read_trace(capture.path)[::-1]
    assert (first.num_tokens, first.num_output, second.num_output) == (150, 4, 9)
    assert second.arrival_s - first.arrival_s == 3.0 and first.tokens_per_id == 64
    assert first.ids and second.ids and first.ids[:2] == second.ids[:2] and first.ids[2] != second.ids[2]
    again = read_trace(_capture(tmp_path / "two", rows).path)[0].ids
    assert again and not {*first.ids} & {*again} and not {*first.ids} & {11, 12, 13}, "captures share no ids"


def test_capture_ends_at_its_size_limit(tmp_path: Path) -> None:
    capture = _capture(tmp_path / "capture", [_seen(101.0, num_output=4)] * 100, max_bytes=1000)
    report = capture.report(111.0)
    assert report["is_full"] and capture.path.stat().st_size == report["bytes"] <= 1000
    assert report["requests"] == len(capture.path.read_text().splitlines()) > 1


def test_full_disk_ends_only_the_capture(tmp_path: Path, files_end: None) -> None:
    """Traffic reports still count, and captured complete lines can be fetched."""
    capture, book = TrafficCapture(tmp_path / "capture", begin_s=0.0), TrafficLog(now=lambda: 1000.0)
    book.ended = capture.note
    book.note(_report("a", {number: _seen(1.0, num_output=4) for number in range(100)}))
    assert len(book.recent()) == 100
    report, text = capture.report(0.0), capture.read(0, 1 << 20)
    assert report["is_full"] and 1 < report["requests"] == len(text.splitlines()) < 100
    assert report["bytes"] == len(text) and all(map(json.loads, text.splitlines()))
    capture.remove()
    assert not capture.path.exists()


def test_capture_replaces_existing_file_or_link(tmp_path: Path) -> None:
    elsewhere, path = tmp_path / "elsewhere", tmp_path / "capture"
    elsewhere.write_text("other content")
    for kind in ("link", "open to others"):
        if kind == "link":
            path.symlink_to(elsewhere)
        else:
            path.write_text("old")
            path.chmod(0o644)
        capture = _capture(path, [_seen(101.0, num_output=4)])
        assert elsewhere.read_text() == "other content"
        assert not path.is_symlink() and path.stat().st_mode & 0o077 == 0
        capture.remove()
