"""`cluster --address USER@HEAD ...`: arguments for ssh, and the command that it runs on the head."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_HEAD = "ubuntu@head"
_SSH = shutil.which("ssh")
_WITHIN_S = 60
_FAKE_SSH = f"""#!{sys.executable}
import json, os, subprocess, sys
json.dump(sys.argv[1:], open(os.environ["SEEN"], "w"))
sys.exit(int(os.environ["FAILS"]) if "FAILS" in os.environ else subprocess.call(["sh", "-c", sys.argv[-1]]))
"""
_FAKE_CLUSTER = f"""#!{sys.executable}
import os, sys
print(sys.argv[1:], os.environ.get("CLUSTER_ADDRESS"), sys.stdin.read())
print("on stderr", file=sys.stderr)
sys.exit(3)
"""


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class _Client:
    """Runner of the real `cluster` with `directory` as its PATH."""

    directory: Path

    def run(self, *arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self.directory), os.defpath])
        state = {"CLUSTER_STATE_DIR": str(self.directory / "state"), "SEEN": str(self.directory / "seen")}
        base = {"PYTHONPATH": str(_ROOT), "PATH": path, "HOME": str(self.directory)}
        return subprocess.run(
            [sys.executable, "-m", "cluster.cli", *arguments],
            env={**base, **state, **environment},
            cwd=self.directory,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
        )

    def remote_words(self, *arguments: str) -> list[str]:
        """Return the arguments of the `cluster` command on the head."""
        done = self.run("--address", _HEAD, *arguments, FAILS="0")
        assert done.returncode == 0, done.stderr
        seen = (self.directory / "seen").read_text()
        *_, end, address, command = json.loads(seen)
        assert (end, address) == ("--", _HEAD), "an address that begins with - is not taken for an option"
        words = shlex.split(command)
        assert words[:4] == ["env", "-u", "CLUSTER_ADDRESS", "cluster"]
        return words[4:]


@pytest.fixture
def client(tmp_path: Path) -> _Client:
    directory = tmp_path / "client"
    _script(directory / "ssh", _FAKE_SSH)
    return _Client(directory)


@pytest.mark.parametrize("prompt", ["Once upon a time", 'it\'s $HOME; `id` "x" \\ *', "--", ""])
def test_arguments_reach_the_head_unchanged(client: _Client, prompt: str) -> None:
    assert client.remote_words("generate", prompt) == ["generate", prompt]
    assert "BatchMode=yes" in (client.directory / "seen").read_text(), "scripts get no password prompt"


def test_deploy_uses_the_ray_of_the_head(client: _Client) -> None:
    assert client.remote_words("deploy", "2P4D") == ["deploy", "2P4D", "--address", "auto"]
    assert client.remote_words("deploy", "there.yaml", "--address=x")[1:] == ["there.yaml", "--address=x"]


def test_streams_and_exit_code_of_any_remote_command_pass_through(client: _Client) -> None:
    _script(client.directory / "cluster", _FAKE_CLUSTER)
    done = client.run("status", "--json", stdin="input", CLUSTER_ADDRESS=_HEAD)
    assert done.stdout == "['status', '--json'] None input\n", "CLUSTER_ADDRESS is unset there"
    assert (done.stderr, done.returncode) == ("on stderr\n", 3)
    program = _script(client.directory / "bin" / "other cluster", _FAKE_CLUSTER)
    done = client.run("--address", _HEAD, "status", CLUSTER_REMOTE_COMMAND=shlex.join([str(program), "--first"]))
    assert done.stdout == "['--first', 'status'] None \n"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--address", _HEAD, "status"], {"FAILS": "255"}, f"--address {_HEAD}: ssh failed; try `ssh {_HEAD} true`"),
        (
            ["--address", _HEAD, "status"],
            {"FAILS": "127"},
            f"--address {_HEAD}: cluster was not found there; set CLUSTER_REMOTE_COMMAND to its path on that host",
        ),
        (
            ["--address", _HEAD, "status"],
            {"PATH": "/nowhere"},
            f"--address {_HEAD}: ssh is not installed; install it (Debian: openssh-client)",
        ),
        (
            ["--address", f"{_HEAD}:6379", "status"],
            {},
            f"--address {_HEAD}:6379: ssh takes USER@HOST without Ray's port; write {_HEAD} (or ssh://{_HEAD}:6379, if "
            "6379 is the port of its sshd)",
        ),
        (
            ["--address", _HEAD, "deploy", "here.yaml"],
            {},
            f"here.yaml is a local file, but the command runs at {_HEAD}; run `scp here.yaml {_HEAD}:`, then `ssh -t "
            f"{_HEAD} cluster deploy here.yaml --address auto`",
        ),
    ],
    ids=["unreachable", "no cluster", "no ssh", "port of Ray", "local spec file"],
)
def test_failures_of_ssh_are_one_line(
    client: _Client, arguments: list[str], environment: dict[str, str], message: str
) -> None:
    (client.directory / "here.yaml").write_text("{}")
    done = client.run(*arguments, **environment)
    assert (done.stderr, done.returncode) == (f"cluster: {message}\n", 2)


@pytest.mark.parametrize("address", ["ubuntu@fe80::1", "ssh://ubuntu@head:2222"])
def test_other_addresses_are_left_to_ssh(client: _Client, address: str) -> None:
    assert client.run("--address", address, "status", FAILS="0").returncode == 0
    assert f'"--", "{address}"' in (client.directory / "seen").read_text()


@pytest.mark.skipif(not _SSH, reason="needs ssh (Debian: openssh-client)")
def test_real_ssh_accepts_the_options(client: _Client) -> None:
    client.remote_words("status")
    *options, _ = json.loads((client.directory / "seen").read_text())
    assert _SSH
    parsed = subprocess.run([_SSH, "-F", "none", "-G", *options], capture_output=True, text=True, timeout=_WITHIN_S)
    assert parsed.returncode == 0, parsed.stderr
    assert {"user ubuntu", "hostname head", "batchmode yes", "connecttimeout 15"} <= {*parsed.stdout.splitlines()}
