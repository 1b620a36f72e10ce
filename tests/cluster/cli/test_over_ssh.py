"""`cluster --address USER@HOST …`: what is asked of ssh."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.cli.app import run

_HEAD = "ubuntu@head"
_NOT_OVER_THERE = ["env", "-u", "CLUSTER_ADDRESS", "-u", "CLUSTER_CERTIFICATE"]


class ReplacedBySsh(Exception):
    """This process would be another one now."""


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The exit code of `cluster --address …`, if it is not replaced."""

    def execvp(program: str, arguments: list[str]) -> None:
        raise ReplacedBySsh(program, arguments)

    def execute(address: str, *command: str) -> int:
        arguments = ["--address", address, *command]
        monkeypatch.setattr(sys, "argv", ["cluster", *arguments])
        return run(arguments)

    monkeypatch.setattr("os.execvp", execvp)
    monkeypatch.setenv("CLUSTER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return execute


@pytest.fixture
def asked(execute: Callable[..., int]) -> Callable[..., str]:
    """What a shell over there runs."""

    def ask(*command: str, address: str = _HEAD) -> str:
        with pytest.raises(ReplacedBySsh) as replaced:
            execute(address, *command)
        program, [name, *options, end, where, there] = replaced.value.args
        assert program == name == "ssh" and not set(options) - {"-t"}
        assert (end, where) == ("--", address), "whatever it begins with, it is no option"
        return str(there)

    return ask


def test_a_command_runs_there_as_it_was_written(asked: Callable[..., str]) -> None:
    words = shlex.split(asked("generate", "Once upon a time"))
    assert words == [*_NOT_OVER_THERE, "cluster", "generate", "Once upon a time"]


def test_deploy_goes_to_the_ray_that_runs_there(asked: Callable[..., str]) -> None:
    assert asked("deploy", "2P4D").endswith(" cluster deploy 2P4D --address auto")
    assert asked("deploy", "there.yaml", "--address=x").endswith(" cluster deploy there.yaml --address=x")


def test_what_the_environment_says_over_there_is_not_obeyed(asked: Callable[..., str], tmp_path: Path) -> None:
    """Where it named that host itself, the command would call itself for ever."""
    program = tmp_path / "cluster"
    program.write_text('#!/bin/sh\necho "$* ${CLUSTER_ADDRESS-unset} ${CLUSTER_CERTIFICATE-unset}"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.defpath}", "CLUSTER_ADDRESS": _HEAD, "CLUSTER_CERTIFICATE": "ann.json"}
    there = ["sh", "-c", asked("status", "--json")]
    done = subprocess.run(there, env=environment, check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout == "status --json unset unset\n"


def test_rays_port_is_none_of_sshs(execute: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(f"{_HEAD}:6379", "status") == 2
    assert "without Ray's port; write ubuntu@head (or ssh://ubuntu@head:6379," in capsys.readouterr().err


@pytest.mark.parametrize("address", ["ubuntu@fe80::1", "ssh://ubuntu@head:2222"])
def test_an_address_that_ssh_can_read_is_left_to_it(asked: Callable[..., str], address: str) -> None:
    assert asked("status", address=address).endswith(" cluster status")


def test_a_spec_that_is_here_is_not_there(
    execute: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here.yaml").write_text("{}")
    assert execute(_HEAD, "deploy", "here.yaml") == 2
    said = capsys.readouterr().err
    assert "here.yaml is a file of this machine" in said and "`scp here.yaml ubuntu@head:`" in said
