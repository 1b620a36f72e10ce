"""Whether this project is right and quick on the GPU of this machine: one command, some minutes, a verdict for each
thing. It needs neither Ray nor Redis; what needs Redis is skipped where that is not installed.

    python -m tests.gpu_check [-o DIRECTORY] [--minutes 9] [--rehearse] [WORDS OF A PART'S NAME …]

Each part is a program with its own timeout. Tests run side by side; then what is timed, or takes the whole device, one
after the other. What is known is written at once: DIRECTORY has a log of each part, and report.md and report.json after
each. Exit status: 0 when nothing failed and no threshold was missed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from xml.etree import ElementTree

from tests.gpu_check.parts import Part, parts
from tests.gpu_check.report import Report
from tests.gpu_check.rows import Row, heard

_ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description=__doc__)
    parser.add_argument("-o", dest="directory", type=Path, default=Path("gpu-check"), metavar="DIRECTORY")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: only the check itself is tested")
    parser.add_argument("parts", nargs="*", help="only those with one of these words in their names")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    report, deadline = Report(options.directory), time.monotonic() + 60 * options.minutes
    chosen = [
        (part, options.directory / f"{number:02}")
        for number, part in enumerate(parts(rehearses=options.rehearse))
        if not options.parts or any(word in part.name for word in options.parts)
    ]
    tests = [(part, place) for part, place in chosen if part.is_tests and not part.is_alone]
    if tests:
        print(f"side by side, for minutes: {', '.join(part.name for part, _ in tests)}", flush=True)
    with ThreadPoolExecutor(len(tests) or 1) as pool:  # nothing is timed there
        together = {pool.submit(_all_of, part, place, deadline): part for part, place in tests}
        for done in as_completed(together):
            report.part(together[done].name, done.result())
    for part, place in chosen:
        if part.is_alone or not part.is_tests:
            report.part(part.name, run(part, place, time_left_s=deadline - time.monotonic()))
    sys.exit(0 if report.is_fine else 1)


def _all_of(part: Part, place: Path, deadline: float) -> list[Row]:
    return list(run(part, place, time_left_s=deadline - time.monotonic()))


def run(part: Part, place: Path, *, time_left_s: float) -> Iterator[Row]:
    """What a part says, as it says it. place: without a suffix, where its log and its results go."""
    if part.hindrance:
        yield Row(name=part.name, value=part.hindrance, is_skipped=True)
        return
    timeout_s = min(part.timeout_s, time_left_s)
    if timeout_s <= 0:
        yield Row(name=part.name, value="no time was left for it", has_failed=True)
        return
    junit = place.with_suffix(".xml")
    is_late = threading.Event()
    has_failed, last = False, ""
    with (
        place.with_suffix(".log").open("w") as log,
        subprocess.Popen(
            part.writing(junit),
            cwd=_ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **part.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):

        def end() -> None:
            is_late.set()
            os.killpg(process.pid, signal.SIGKILL)

        watch = threading.Timer(timeout_s, end)
        watch.start()
        assert process.stdout
        for line in process.stdout:
            log.write(line)
            log.flush()
            if row := heard(line):
                has_failed |= row.has_failed
                yield row
            else:
                last = line.strip() or last
        status = process.wait()
        watch.cancel()
    for row in _tested(junit):
        has_failed |= row.has_failed
        yield row
    if is_late.is_set():
        yield Row(name=part.name, value=f"not over after {timeout_s:.0f} s", has_failed=True)
    elif status and not has_failed:
        yield Row(name=part.name, value=f"exit status {status}: {last}", has_failed=True)


def _tested(junit: Path) -> list[Row]:
    """What pytest wrote, if it did."""
    if not junit.exists():
        return []
    cases = list(ElementTree.parse(junit).iter("testcase"))
    kinds = [{child.tag for child in case} for case in cases]
    failed = [
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        for case, of in zip(cases, kinds, strict=True)
        if of & {"failure", "error"}
    ]
    skipped = sum("skipped" in of for of in kinds)
    passed = len(cases) - len(failed) - skipped
    rows = [Row(name=name, value="see the log", has_failed=True) for name in failed]
    return [Row(name="tests", value=f"{passed} passed, {len(failed)} failed, {skipped} skipped"), *rows]
