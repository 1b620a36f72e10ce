"""What the scripts of deploy/ray do on a host, by what they run: ray, Python, ssh and sudo are scripts that note it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_SCRIPTS = Path(__file__).parents[2] / "deploy" / "ray"
_TOOLS = "bash cat chmod dirname basename env find grep id mkdir mv realpath rm sha256sum touch cp hostname".split()
# What it can do depends on two files in its home.
_PYTHON = """
case "$*" in
    -V) echo {version} ;;
    "-m venv --clear"*)
        [ -e {home}/can-venv ] && mkdir -p "$4/bin" && cp {tools}/pip "$4/bin" && cp "$0" "$4/bin/python" ;;
    *find_spec*) [ -e {home}/has-ray ] ;;
esac
"""


@dataclass(frozen=True)
class Host:
    """A home, a checkout in it, and a PATH with nothing but what was put there."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def kept(self) -> Path:
        return self.home / ".xpyd"

    @property
    def checkout(self) -> Path:
        return self.home / "xpyd"

    def tool(self, name: str, body: str = "") -> None:
        """A program that notes how it was called, and then does this."""
        path = self.root / "bin" / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{self.root}/told\n{body}\n')
        path.chmod(0o755)

    def python(self, name: str, version: str) -> None:
        self.tool(name, _PYTHON.format(version=version, home=self.home, tools=self.root / "bin"))

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (self.root / "told").write_text("")
        environment = {"HOME": str(self.home), "PATH": str(self.root / "bin")}
        command = ["bash", str(self.checkout / "deploy" / "ray" / script), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    @property
    def told(self) -> list[str]:
        return (self.root / "told").read_text().splitlines()

    def count(self, begin: str) -> int:
        return sum(line.startswith(begin) for line in self.told)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    for directory in (host.kept, host.checkout, tmp_path / "bin"):
        directory.mkdir(parents=True)
    shutil.copytree(_SCRIPTS, host.checkout / "deploy" / "ray")
    for file in ("pyproject.toml", "constraints.txt"):
        (host.checkout / file).touch()
    for tool in _TOOLS:
        found = shutil.which(tool)
        assert found
        (tmp_path / "bin" / tool).symlink_to(found)
    host.tool("pip")
    return host


@pytest.fixture
def bare(host: Host) -> Host:
    """Where Python can do all that is asked of it."""
    host.python("python3.12", "Python 3.12.4")
    for able in ("can-venv", "has-ray"):
        (host.home / able).touch()
    return host


def set_up(host: Host) -> bool:
    """Whether anything was installed."""
    done = host.run("setup.sh")
    assert done.returncode == 0, done.stderr
    return host.count("pip install") == 1


def test_a_second_setup_installs_nothing_until_something_changes(bare: Host) -> None:
    assert set_up(bare) and not set_up(bare)
    (bare.checkout / "constraints.txt").write_text("ray==9\n")
    assert set_up(bare) and not bare.count("python3.12 -m venv"), "the environment is good enough for that"
    bare.python("python3.12", "Python 3.12.5")
    assert set_up(bare) and bare.count("python3.12 -m venv") == 1
    assert not set_up(bare)


def test_an_environment_that_is_broken_is_made_anew(bare: Host) -> None:
    assert set_up(bare)
    (bare.kept / "venv" / "bin" / "python").unlink()
    assert set_up(bare) and not set_up(bare)


def test_setup_takes_the_heads_python_where_there_is_one(bare: Host) -> None:
    bare.python("python3.13", "Python 3.13.1")
    (bare.kept / "head-python").write_text("Python 3.12.4\n")
    assert set_up(bare) and bare.count("python3.12 -m venv") == 1
    (bare.kept / "head-python").unlink()
    assert set_up(bare) and bare.count("python3.13 -m venv") == 1, "the newest"


def test_setup_says_what_a_host_lacks(host: Host) -> None:
    host.tool("sudo", "exit 1")
    done = host.run("setup.sh")
    assert done.returncode == 1 and "there is no python3; install Python 3.11 or later" in done.stderr
    host.python("python3.12", "Python 3.12.4")
    host.tool("apt-get", "exit 1")
    done = host.run("setup.sh")
    assert done.returncode == 1 and "install python3.12-venv there, as root" in done.stderr
    assert not (host.kept / "installed").exists()


def test_setup_fetches_the_package_that_makes_environments(bare: Host) -> None:
    (bare.home / "can-venv").unlink()
    bare.tool("sudo", 'shift; "$@"')
    bare.tool("apt-get", f"[ $1 = update ] || touch {bare.home}/can-venv")
    assert set_up(bare)
    assert [line for line in bare.told if line.startswith("apt-get")] == [
        "apt-get update -qq",
        "apt-get install -qq -y python3.12-venv",
    ]


@pytest.fixture
def worker(host: Host) -> Host:
    host.tool("ray", "echo reconnect=$RAY_gcs_rpc_server_reconnect_timeout_s >>$HOME/../told")
    host.tool("pgrep")
    (host.checkout / "a.py").touch()
    (host.kept / "installed").touch()
    (host.root / "labels.yaml").touch()
    return host


def join(host: Host) -> list[str]:
    """What is asked of Ray."""
    done = host.run("worker.sh", "10.0.0.10", f"--labels-file={host.root}/labels.yaml")
    assert done.returncode == 0, done.stderr
    return [line for line in host.told if line.startswith(("ray", "reconnect"))]


def replace(path: Path) -> None:
    """As rsync does: its content may be as old as before."""
    path.parent.mkdir(exist_ok=True)
    new = path.with_name("new")
    new.touch()
    os.utime(new, (1, 1))
    new.rename(path)


def test_without_a_store_a_worker_starts_anew(worker: Host) -> None:
    (worker.kept / "ray-store").write_text("\n")
    started = f"ray start --address=10.0.0.10:6379 --labels-file={worker.root}/labels.yaml"
    for _ in range(2):
        assert join(worker) == ["ray stop", "reconnect=", started, "reconnect=10"]


def test_with_a_store_a_worker_is_left_alone_until_what_it_runs_has_changed(worker: Host) -> None:
    (worker.kept / "ray-store").write_text("10.0.0.9:6379 secret\n")
    assert "reconnect=600" in join(worker)
    assert join(worker) == []
    changes = (
        worker.checkout / "a.py",
        worker.checkout / "deploy" / "ray" / "worker.sh",
        worker.kept / "installed",
        worker.root / "labels.yaml",
    )
    for changed in changes:
        content = changed.read_bytes()
        replace(changed)
        changed.write_bytes(content)
        assert join(worker), changed
        assert join(worker) == []
    worker.tool("pgrep", "exit 1")
    assert join(worker), "it runs no more"


@pytest.mark.parametrize(
    "file", ["xpyd.egg-info/PKG-INFO", "__pycache__/a.cpython-312.pyc", ".ruff_cache/a.json", "on-prem.yaml"]
)
def test_what_a_host_or_its_operator_writes_beside_the_code_is_no_change(worker: Host, file: str) -> None:
    (worker.kept / "ray-store").write_text("10.0.0.9:6379\n")
    assert join(worker)
    replace(worker.checkout / file)
    assert join(worker) == []


def test_a_worker_with_another_python_says_so_and_stays_out(worker: Host) -> None:
    (worker.kept / "head-python").write_text("Python 3.12.4\n")
    (worker.kept / "venv" / "bin").mkdir(parents=True)
    python = worker.kept / "venv" / "bin" / "python"
    worker.python("python", "Python 3.12.5")
    python.symlink_to(worker.root / "bin" / "python")
    done = worker.run("worker.sh", "10.0.0.10")
    assert done.returncode == 1 and not worker.count("ray")
    assert "it has Python 3.12.5, the head Python 3.12.4" in done.stderr
    worker.python("python", "Python 3.12.4")
    assert join(worker)


def test_stop_ends_the_head_first_and_goes_on_past_what_does_not_answer(host: Host) -> None:
    for name in ("a", "b"):
        directory = host.home / ".local" / "state" / "xpyd" / name
        directory.mkdir(parents=True)
        (directory / "state.json").touch()
    host.tool("cluster", '[ "$4" = b ]')
    host.tool("ray", "exit 1")
    host.tool("python", "echo ubuntu 10.0.0.11; echo ubuntu 10.0.0.12")
    host.tool("ssh", "[[ $* != *10.0.0.11* ]]")
    done = host.run("stop.sh")
    assert done.returncode == 0
    *before, first, second = [line for line in host.told if not line.startswith("python")]
    assert before == ["cluster down --force --name a", "cluster down --force --name b", "ray stop --force"]
    assert "ubuntu@10.0.0.11 ray stop --force" in first and "ubuntu@10.0.0.12 ray stop --force" in second
    assert "a could not be taken down" in done.stderr and "10.0.0.11 does not answer" in done.stderr
