"""`cluster --address USER@HOST …`: what is asked of ssh."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.cli.app import run


class ReplacedBySsh(Exception):
    """This process would be another one now."""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What runs there, in words."""

    def execvp(program: str, arguments: list[str]) -> None:
        raise ReplacedBySsh(arguments[-1])

    def ask(*command: str) -> list[str]:
        arguments = ["--address", "ubuntu@head", *command]
        monkeypatch.setattr(sys, "argv", ["cluster", *arguments])
        with pytest.raises(ReplacedBySsh) as replaced:
            run(arguments)
        return shlex.split(str(replaced.value))

    monkeypatch.setattr("os.execvp", execvp)
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return ask


def test_a_command_runs_there_as_it_was_written(asked: Callable[..., list[str]]) -> None:
    assert asked("generate", "Once upon a time") == ["cluster", "generate", "Once upon a time"]


def test_deploy_goes_to_the_ray_that_runs_there(asked: Callable[..., list[str]]) -> None:
    assert asked("deploy", "2P4D") == ["cluster", "deploy", "2P4D", "--address", "auto"]
    assert asked("deploy", "there.yaml", "--address=x") == ["cluster", "deploy", "there.yaml", "--address=x"]


def test_a_spec_that_is_here_is_not_there(
    asked: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here.yaml").write_text("{}")
    arguments = ["--address", "ubuntu@head", "deploy", "here.yaml"]
    sys.argv[1:] = arguments
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert "here.yaml is a file of this machine" in said and "`scp here.yaml ubuntu@head:`" in said
