"""`python -m benchmarks chaos`, without a deployment."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.app import run


@pytest.fixture(autouse=True)
def _no_deployments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path))


def test_list_shows_all_faults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", "--faults", "list"]) == 0
    out = capsys.readouterr().out
    assert "kill-decode" in out and "redis-down" in out


def test_unknown_fault_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", "--faults", "kill-decode,meteor"]) == 2
    assert "fault meteor not found; available: kill-prefill, kill-decode" in capsys.readouterr().err


def test_missing_deployment_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", "--all"]) == 2
    assert "nothing is deployed" in capsys.readouterr().err
