"""Check of this project's correctness and speed on this machine's GPU: one command, some minutes, a verdict per part.

It needs neither Ray nor Redis; parts that need Redis are skipped where it is not installed.

    python -m tests.gpu_check [-o DIRECTORY] [--minutes 9] [--rehearse] [WORDS OF A PART'S NAME …]

The machine's versions come first: if torch finds no GPU, no other part runs. Each part is a program with its own
timeout. Tests run side by side; parts that measure time, or take the whole device, run one by one. Results are written
at once: DIRECTORY has a log of each part, and report.md and report.json are updated after each. An interruption ends
running parts and keeps the results. Exit status: 0 if nothing failed and no threshold was missed.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from xml.etree import ElementTree

from tests.gpu_check.parts import Part, parts
from tests.gpu_check.report import Report
from tests.gpu_check.rows import Row, heard
from tests.gpu_check.running import Running

_ROOT = Path(__file__).parents[2]
_LOOK_S = 0.2
_SHOWN = 300  # characters of a line that is not a row
# Grace period for processes that a finished part has left behind and that still hold its output.
_LEFT_S = 5.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    options = _options()
    machine, *others = [
        (part, options.directory / f"{number:02}") for number, part in enumerate(parts(rehearses=options.rehearse))
    ]
    chosen = [(part, place) for part, place in others if _is_asked_for(part, options.parts)]
    options.directory.mkdir(parents=True, exist_ok=True)
    left_out = [part.name for part, _ in others if not _is_asked_for(part, options.parts)]
    report, running = Report(options.directory, left_out=left_out), Running()
    deadline = time.monotonic() + 60 * options.minutes
    for number in _ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        found = list(run(*machine, time_left_s=deadline - time.monotonic(), running=running))
        report.part(machine[0].name, found)
        if not any(row.has_failed for row in found):
            _run_all(chosen, report, deadline, running)
    except SystemExit:
        report.part("interrupted", [Row(name="what is not above", value="not looked at", has_failed=True)])
        raise
    finally:
        running.end()
        print(f"\n{report.summary}\nlogs, report.md and report.json are in {options.directory}", flush=True)
    sys.exit(0 if report.is_fine else 1)


def _options() -> argparse.Namespace:
    names = [part.name for part in parts(rehearses=False)]
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {name}" for name in names),
    )
    parser.add_argument("-o", dest="directory", type=Path, default=Path("gpu-check"), metavar="DIRECTORY")
    parser.add_argument("--minutes", type=_minutes, default=9.0, help="for all parts together (default: 9)")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: only the check itself is tested")
    parser.add_argument("parts", nargs="*", metavar="WORD", help="only parts with one of these words in their names")
    options = parser.parse_args()
    for word in options.parts:
        if not any(word in name for name in names):
            parser.error(f"no part has {word!r} in its name; they are: {', '.join(names)}")
    return options


def _minutes(text: str) -> float:
    minutes = float(text)
    if not (0 < minutes and math.isfinite(minutes)):
        raise argparse.ArgumentTypeError("must be above 0")
    return minutes


def _is_asked_for(part: Part, words: Sequence[str]) -> bool:
    return not words or any(word in part.name for word in words)


def _run_all(chosen: Sequence[tuple[Part, Path]], report: Report, deadline: float, running: Running) -> None:
    tests = [(part, place) for part, place in chosen if part.is_tests and not part.is_alone]
    if tests:
        print(f"\nside by side, for minutes: {', '.join(part.name for part, _ in tests)}", flush=True)
    with ThreadPoolExecutor(len(tests) or 1) as pool:  # tests measure no time
        together = {pool.submit(_all_of, part, place, deadline, running): part for part, place in tests}
        try:
            for done in as_completed(together):
                report.part(together[done].name, done.result())
        except SystemExit:
            running.end()  # otherwise the pool would wait for them
            raise
    for part, place in chosen:
        if part.is_alone or not part.is_tests:
            report.part(part.name, run(part, place, time_left_s=deadline - time.monotonic(), running=running))


def _all_of(part: Part, place: Path, deadline: float, running: Running) -> list[Row]:
    return list(run(part, place, time_left_s=deadline - time.monotonic(), running=running))


def run(part: Part, place: Path, *, time_left_s: float, running: Running) -> Iterator[Row]:
    """Run a part and yield its rows as they come. place: path without suffix for its log and results.

    Ends the part's process group in any case.
    """
    if part.hindrance:
        yield Row(name=part.name, value=part.hindrance, is_skipped=True)
        return
    timeout_s = min(part.timeout_s, time_left_s)
    if timeout_s <= 0:
        yield Row(name=part.name, value="no time was left for it", has_failed=True)
        return
    junit = place.with_suffix(".xml")
    junit.unlink(missing_ok=True)  # of an earlier check
    has_spoken, has_failed, last, until = False, False, "", time.monotonic() + timeout_s
    process = subprocess.Popen(
        part.writing(junit),
        cwd=_ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        with running.group(process.pid), place.with_suffix(".log").open("w", encoding="utf-8") as log:
            for line in _lines(process, until):
                log.write(line)
                log.flush()
                if row := heard(line):
                    has_spoken, has_failed = True, has_failed or row.has_failed
                    yield row
                else:
                    last = line.strip()[:_SHOWN] or last
            is_late = not _has_ended(process)
    finally:
        status = process.wait()
    for row in _tested(junit):
        has_spoken, has_failed = True, has_failed or row.has_failed
        yield row
    if is_late:
        yield Row(name=part.name, value=f"not over after {timeout_s:.0f} s", has_failed=True)
    elif status and not has_failed:
        yield Row(name=part.name, value=f"exit status {status}: {last}", has_failed=True)
    elif not has_spoken:
        yield Row(name=part.name, value=f"it has found nothing: {last}", has_failed=True)


def _lines(process: subprocess.Popen[str], until: float) -> Iterator[str]:
    """Yield the lines of its output until it has ended, or its timeout.

    Neither the end of the process nor of its output suffices: output may still be unread, and a child process may hold
    the output in a session of its own.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    ended_at = None
    while time.monotonic() < until:
        try:
            line = lines.get(timeout=_LOOK_S)
        except queue.Empty:
            if _has_ended(process):
                ended_at = ended_at or time.monotonic()
                if time.monotonic() > ended_at + _LEFT_S:
                    return
            continue
        if line is None:
            _wait_for(process, until)
            return
        yield line


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _wait_for(process: subprocess.Popen[str], until: float) -> None:
    descriptor = os.pidfd_open(process.pid)
    try:
        select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
    finally:
        os.close(descriptor)


def _has_ended(process: subprocess.Popen[str]) -> bool:
    """Check without reaping the process, so that its id is not reused before its group is ended."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _tested(junit: Path) -> list[Row]:
    """Return the rows of pytest's results, if it wrote any."""
    if not junit.exists():
        return []
    try:
        cases = list(ElementTree.parse(junit).iter("testcase"))
    except ElementTree.ParseError as error:
        return [Row(name="tests", value=f"what pytest wrote cannot be read: {error}", has_failed=True)]
    kinds = [{child.tag for child in case} for case in cases]
    failed = [
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        for case, of in zip(cases, kinds, strict=True)
        if of & {"failure", "error"}
    ]
    skipped = sum("skipped" in of for of in kinds)
    passed = len(cases) - len(failed) - skipped
    rows = [Row(name=name, value="see the log", has_failed=True) for name in failed]
    lines = f"{passed} passed, {len(failed)} failed, {skipped} skipped"
    return [Row(name="tests", value=lines, is_skipped=not passed and not failed), *rows]
