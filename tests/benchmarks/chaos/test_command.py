"""`python -m benchmarks chaos` as far as it goes without a deployment."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.app import run


@pytest.fixture(autouse=True)
def _no_deployments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))


def test_it_names_its_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", "--faults", "list"]) == 0
    out = capsys.readouterr().out
    assert "kill-decode" in out and "redis-down" in out


def test_an_unknown_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", "--faults", "kill-decode,meteor"]) == 2
    assert "no fault is called meteor; there are: kill-prefill, kill-decode" in capsys.readouterr().err


def test_there_must_be_something_to_strike(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", "--all"]) == 2
    assert "nothing is deployed" in capsys.readouterr().err
