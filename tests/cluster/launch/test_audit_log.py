"""Audit log of operator commands."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from cluster.cli.app import run


@pytest.fixture(autouse=True)
def root(state_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # A command may set it for its own process.
    monkeypatch.setenv("CLUSTER_ADDRESS", "")
    monkeypatch.setenv("SSH_CONNECTION", "10.1.2.3 5000 10.1.2.4 22")
    return state_root


def test_changing_commands_are_logged_with_their_outcome(root: Path) -> None:
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
def test_passwords_are_not_logged(root: Path, url: str, shown: str) -> None:
    assert run(["deploy", "no-such-file.yaml", "--set", f"index={url}"]) == 2
    text = (root / "commands.jsonl").read_text()
    assert "s3cret" not in text and json.loads(text)["command"][-1] == f"index={shown}"


def test_read_only_commands_and_prompts_are_not_logged(root: Path) -> None:
    run(["logs", "decode-0"])
    run(["generate", "deploy"])
    run(["--help"])
    assert not (root / "commands.jsonl").exists()


def test_user_id_without_a_home_is_told_the_variable_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CLUSTER_STATE_DIR")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert run(["scale", "prefill=2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cluster: HOME is not set") and "set CLUSTER_STATE_DIR to a writable directory" in line


def test_failed_write_is_ignored(root: Path) -> None:
    root.write_text("a file where the directory should be")
    assert run(["scale", "prefill=2"]) == 2
