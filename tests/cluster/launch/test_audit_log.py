"""Who has changed a deployment, with what command, and what came of it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from cluster.cli.app import run


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("CLUSTER_ADDRESS", "")  # which a command may set, for itself
    monkeypatch.setenv("SSH_CONNECTION", "10.1.2.3 5000 10.1.2.4 22")
    return tmp_path / "state"


def test_a_command_that_changes_something_is_noted_whatever_came_of_it(root: Path) -> None:
    index = "index=redis://someone:s3cret@10.0.0.1:6379"
    assert run(["scale", "prefill=2"]) == 2
    assert run(["--address=10.0.0.1:1", "deploy", "no-such-file.yaml", "--set", index]) == 2
    assert run(["keys", "--api-key", "s3cret", "--api-key=s3cret", "--no-such-option"]) == 2
    path = root / "commands.jsonl"
    scaled, deployed, _ = [json.loads(line) for line in path.read_text().splitlines()]
    assert scaled["command"] == ["scale", "prefill=2"] and "nothing is deployed" in scaled["error"]
    assert scaled["exit_code"] == 2 and scaled["user"] and scaled["host"] and scaled["from"] == "10.1.2.3"
    assert scaled["time"] > 1e9 and scaled["seconds"] >= 0
    assert "s3cret" not in path.read_text() and deployed["command"][-1] == "index=redis://***@10.0.0.1:6379"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("rediss://u:p@s3cret@h:1/0", "rediss://***@h:1/0"),
        ("redis://u:s3cret/s3cret@h", "redis://***@h"),
        ("redis://h/0?password=s3cret&db=1", "redis://h/0?password=***&db=1"),
        ("redis://h?ssl_password=s3cret", "redis://h?ssl_password=***"),
        ("redis://h:1/0", "redis://h:1/0"),
    ],
)
def test_no_part_of_a_password_is_noted(root: Path, url: str, shown: str) -> None:
    assert run(["deploy", "no-such-file.yaml", "--set", f"index={url}"]) == 2
    text = (root / "commands.jsonl").read_text()
    assert "s3cret" not in text and json.loads(text)["command"][-1] == f"index={shown}"


def test_what_only_looks_is_not_noted_nor_what_somebody_asks_a_model(root: Path) -> None:
    run(["logs", "decode-0"])
    run(["generate", "deploy"])
    run(["--help"])
    assert not (root / "commands.jsonl").exists()


def test_a_note_that_cannot_be_written_keeps_nobody_from_anything(root: Path) -> None:
    root.write_text("a file where the directory should be")
    assert run(["scale", "prefill=2"]) == 2
