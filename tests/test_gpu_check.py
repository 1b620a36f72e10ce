"""Rehearsal of `make gpu-check` without a GPU: every part reports, and no failure is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu_check import check, versions
from tests.gpu_check.kernels import least_ratio
from tests.gpu_check.parts import Part, parts
from tests.gpu_check.report import Report
from tests.gpu_check.rows import Row, heard
from tests.gpu_check.running import Running
from tests.gpu_check.versions import no_device
from tests.support.waiting import until

_ROOT = Path(__file__).parents[1]


def _rehearsed(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.gpu_check", "--rehearse", "-o", str(tmp_path), *words]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads((tmp_path / "report.json").read_text())
    assert all(part["rows"] for part in found)
    assert (tmp_path / "report.md").read_text().count("## ") == len(found)
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rehearsal_passes(tmp_path: Path) -> None:
    found = _rehearsed(tmp_path, "versions", "recorded", "memory errors", "device", "llama-8b", "host's")
    rows = {row["name"]: row for part in found for row in part["rows"]}
    assert len(found) == 6 and "passed" in rows["tests"]["value"] and rows["decode 2 x 32"]["value"] > 0


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    assert len(_rehearsed(tmp_path)) == len([*parts(rehearses=True)])


def test_every_test_of_a_gpu_is_in_some_part() -> None:
    places = [
        (_ROOT / word).resolve()
        for part in parts(rehearses=False)
        for word in part.command
        if word.startswith("tests/") and part.is_tests
    ]
    assert all(place.exists() for place in places)
    of_a_gpu = [path for path in (_ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    of_a_gpu = [path for path in of_a_gpu if path.name not in ("test_gpu_suite.py", Path(__file__).name)]
    left_out = [path for path in of_a_gpu if not any(path.is_relative_to(place) for place in places)]
    assert len(of_a_gpu) > 10 and not left_out


def test_only_few_rows_must_be_quicker_than_in_bf16() -> None:
    assert least_ratio("product fp8 qkv 64") == least_ratio("coded_experts fp8 decode") == 1.6
    assert least_ratio("product fp8 qkv 2048") is None and least_ratio("coded_experts fp8 prefill") is None


def _program(tmp_path: Path, text: str, **more: Any) -> list[Row]:
    program = tmp_path / "program.py"
    program.write_text(text)
    return _run(tmp_path, Part(name="a part", command=[sys.executable, str(program)], **{"timeout_s": 60.0} | more))


def _run(tmp_path: Path, part: Part) -> list[Row]:
    return list(check.run(part, tmp_path / "00", time_left_s=60.0, running=Running()))


def test_output_of_a_hung_part_is_kept(tmp_path: Path) -> None:
    text = 'import sys, time\nprint(\'{"name": "copy", "value": 3.0}\', flush=True)\ntime.sleep(600)'
    copy, late = _program(tmp_path, text, timeout_s=1.0)
    assert (copy.name, copy.value, copy.verdict) == ("copy", 3.0, "")
    assert late.verdict == "FAILED" and "not over after 1 s" in late.shown


def test_broken_part_has_failed_whatever_its_output(tmp_path: Path) -> None:
    (broken,) = _program(tmp_path, "raise SystemExit('no device')")
    assert broken.verdict == "FAILED" and "exit status 1: no device" in broken.shown
    killed = _program(tmp_path, 'import os\nprint(\'{"name": "x", "value": 1}\', flush=True)\nos.abort()')
    assert [row.verdict for row in killed] == ["", "FAILED"]


def _checked(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu_check", *arguments]
    return subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=100, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["kernals"], "no part has 'kernals' in its name; they are: versions, kernels beside"),
        (["--minutes", "-1"], "--minutes: must be above 0"),
        (["--minutes", "inf"], "--minutes: must be above 0"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path: Path, arguments: list[str], expected: str) -> None:
    done = _checked(*arguments, "-o", str(tmp_path / "none"))
    assert done.returncode == 2 and expected in done.stderr and not (tmp_path / "none").exists()


def test_without_a_gpu_nothing_else_is_tried(tmp_path: Path) -> None:
    done = _checked("-o", str(tmp_path), "host's", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "NOT FINE on device none" in done.stdout, done.stdout + done.stderr
    assert [part["part"] for part in json.loads((tmp_path / "report.json").read_text())] == ["versions"]


def _torch(cuda: str | None, *, init: Exception | None = None, devices: int = 0) -> Any:
    def begin() -> None:
        if init:
            raise init

    of_cuda = SimpleNamespace(init=begin, device_count=lambda: devices)
    return SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda=cuda), cuda=of_cuda)


def test_reason_for_a_missing_device() -> None:
    assert "was built without CUDA" in no_device(_torch(None))
    old = RuntimeError("The NVIDIA driver on your system is too old (found version 12040). Please update")
    assert no_device(_torch("13.0", init=old)).endswith("CUDA 13.0, and says: " + str(old).partition(". ")[0])
    assert "CUDA_VISIBLE_DEVICES" in no_device(_torch("13.0")) and not no_device(_torch("13.0", devices=1))


def test_interrupt_ends_programs_and_keeps_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu_check", "--rehearse", "-o", str(tmp_path), "host's"]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        next(line for line in process.stdout if "torch" in line)  # the first part is under way
        process.terminate()
        assert "NOT FINE" in process.stdout.read() and process.wait(60) == 128 + signal.SIGTERM
    machine, *_, last = json.loads((tmp_path / "report.json").read_text())
    assert machine["rows"] and last["part"] == "interrupted"


def test_a_part_is_ended_from_outside_and_none_begins_after(tmp_path: Path) -> None:
    text = 'import os, time\nprint(\'{"name": "x", "value": %d}\' % os.getpid(), flush=True)\ntime.sleep(600)'
    program, running = tmp_path / "program.py", Running()
    program.write_text(text)
    part = Part(name="a part", command=[sys.executable, str(program)], timeout_s=60.0)
    rows = check.run(part, tmp_path / "00", time_left_s=60.0, running=running)
    pid = next(rows).value
    running.end()
    assert [row.shown for row in rows] == ["exit status -9: "]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    (row,) = check.run(part, tmp_path / "00", time_left_s=60.0, running=running)
    assert row.has_failed


def test_summary_lists_skipped_parts(tmp_path: Path) -> None:
    report = Report(tmp_path, left_out=["steps of a model"])
    report.part(
        "versions", [Row(name="device", value="H100"), Row(name="nixl", value="not installed", is_skipped=True)]
    )
    assert report.summary.splitlines() == [
        "Right and quick enough on device H100: 0 failed, 0 thresholds missed, 0 met",
        "skipped: versions: nixl: not installed",
        "not asked for: steps of a model",
    ]
    report.part(
        "kernels", [Row(name="copy", value=0.5, unit="of it", at_least=0.8), Row(name="y", value=1, at_least=1)]
    )
    assert "NOT FINE on device H100: 0 failed, 1 thresholds missed, 1 met" in (tmp_path / "report.md").read_text()
    assert "- MISSED: kernels: copy: 0.5 of it ≥ 0.8" in (tmp_path / "report.md").read_text()


def test_a_part_whose_tests_were_all_skipped_has_not_passed(tmp_path: Path) -> None:
    tests = tmp_path / "test_it.py"
    tests.write_text("import pytest\n@pytest.mark.skip\ndef test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", str(tests), "-p", "no:cacheprovider", "-c", "/dev/null"]
    (row,) = _run(tmp_path, Part(name="tests", command=command, timeout_s=60.0, is_tests=True))
    assert row.verdict == "skipped"


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "copy", "value": null}',
        '{"name": "copy", "value": "much", "at_least": 0.5}',
        '{"name": "copy", "value": 1, "at_least": "much"}',
        '{"name": 7, "value": 1}',
        '{"name": "copy", "value": 1, "is_skipped": "no"}',
        '{"name": "copy", "value": "\\ud800"}',
        "[" * 100_000,
        "\x00\x1b[31m\xff",
    ],
    ids=range(8),
)
def test_malformed_rows_are_ignored(line: str, tmp_path: Path) -> None:
    """Output of libraries, or of a broken part."""
    good = '{"name": "x", "value": 1}'
    report = Report(tmp_path)
    report.part("a part", _program(tmp_path, f"print({line!r})\nprint({good!r})"))
    assert report.is_fine
    (part,) = json.loads((tmp_path / "report.json").read_text())
    assert [row["name"] for row in part["rows"]] == ["x"]


def test_silent_part_has_no_findings(tmp_path: Path) -> None:
    (row,) = _program(tmp_path, "print('all is well' * 1000)")
    assert row.verdict == "FAILED" and "all is well" in row.shown and len(row.shown) < 400


def test_earlier_and_partial_results_are_ignored(tmp_path: Path) -> None:
    junit = tmp_path / "00.xml"
    junit.write_text('<testsuite><testcase name="a"/></testsuite>')
    (row,) = _program(tmp_path, "import os; os.abort()", is_tests=True)
    assert row.verdict == "FAILED" and "exit status" in row.shown
    half = f"import pathlib; pathlib.Path({str(junit)!r}).write_text('<testsuite><testcase')"
    (row,) = _program(tmp_path, half, is_tests=True)
    assert row.verdict == "FAILED" and "cannot be read" in row.shown


def test_processes_left_by_a_part_are_not_waited_for(tmp_path: Path) -> None:
    """The process holds the part's output, in a session of its own, where signals to the part's do not reach it."""
    number = tmp_path / "number"
    left = f"""import pathlib, subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path({str(number)!r}).write_text(str(left.pid))
print('{{"name": "x", "value": 1}}')"""
    try:
        rows = _program(tmp_path, left, timeout_s=1.0)
    finally:
        os.kill(int(number.read_text()), signal.SIGKILL)
    assert [row.name for row in rows] == ["x"]


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@pytest.mark.parametrize("is_tests", [True, False])
def test_an_interrupted_check_leaves_nothing_on_the_device(
    is_tests: bool, number: signal.Signals, tmp_path: Path
) -> None:
    at = tmp_path / "number"
    part = f"import os, pathlib, time; pathlib.Path({str(at)!r}).write_text(str(os.getpid())); time.sleep(600)"
    main = f"""import sys
from tests.gpu_check import check
from tests.gpu_check.parts import Part
program = "import json; print(json.dumps(dict(name='x', value=1)))"
machine = Part(name="machine", command=[sys.executable, "-c", program], timeout_s=60.0)
part = Part(name="a part", command=[sys.executable, "-c", {part!r}], timeout_s=600.0, is_tests={is_tests})
check.parts = lambda rehearses: [machine, part]
sys.argv[1:] = ["-o", {str(tmp_path)!r}]
check.main()"""
    process = subprocess.Popen(
        [sys.executable, "-c", main], cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: at.exists() and at.read_text(), within_s=60)
        process.send_signal(number)
        assert process.wait(30) != 0
        until(lambda: not _is_there(int(at.read_text())))  # killed, then reaped by the process that inherits it
    finally:
        process.kill()
        process.wait()


def test_failed_tests_are_named(tmp_path: Path) -> None:
    tests = tmp_path / "test_it.py"
    tests.write_text("def test_good(): pass\ndef test_bad(): assert 0\n")
    command = [sys.executable, "-m", "pytest", str(tests), "-p", "no:cacheprovider", "-c", "/dev/null"]
    count, bad = _run(tmp_path, Part(name="tests", command=command, timeout_s=60.0, is_tests=True))
    assert count.shown == "1 passed, 1 failed, 0 skipped"
    assert bad.verdict == "FAILED" and bad.name == "test_it::test_bad"


def test_part_with_a_missing_requirement_is_skipped_and_one_without_time_fails(tmp_path: Path) -> None:
    (row,) = _run(tmp_path, Part(name="a part", command=["false"], timeout_s=1.0, hindrance="not installed: redis"))
    assert row.verdict == "skipped" and row.is_fine
    (row,) = check.run(
        Part(name="a part", command=["false"], timeout_s=1.0), tmp_path / "00", time_left_s=0.0, running=Running()
    )
    assert row.verdict == "FAILED"


@pytest.mark.parametrize(("free", "verdict"), [(79, "met"), (40, "MISSED")])
def test_busy_device_is_reported(
    free: int, verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = SimpleNamespace(name="a GPU", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132)
    monkeypatch.setattr(versions, "no_device", lambda torch: "")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (free << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)))
    monkeypatch.setattr(sys, "argv", ["versions"])
    versions.main()
    rows = {row.name: row for line in capsys.readouterr().out.splitlines() if (row := heard(line))}
    assert rows["memory that nobody has"].verdict == verdict


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row(name="x", value=0.9, at_least=0.85), "met"),
        (Row(name="x", value=0.8, at_least=0.85), "MISSED"),
        (Row(name="x", value=0.3, at_most=0.2), "MISSED"),
        (Row(name="x", value=0.1, at_most=0.2), "met"),
        (Row(name="x", value=float("nan"), at_least=0.85), "MISSED"),
        (Row(name="x", value=0.1), ""),
    ],
)
def test_verdicts(row: Row, verdict: str) -> None:
    assert row.verdict == verdict and row.is_fine is (verdict != "MISSED")
