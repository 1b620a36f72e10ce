"""Scripts of deploy/ray on a host where ray, Python, ssh and sudo are scripts that record their calls."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

_SCRIPTS = Path(__file__).parents[2] / "deploy" / "ray"
_TOOLS = """basename bash cat chmod cp dirname env find flock grep hostname id mkdir mv realpath rm sha256sum sort touch
xargs""".split()
_HEAD = "10.0.0.10"
# Its behavior depends on two files in its home.
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
    """A home with a checkout, and a PATH with only the given tools."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def state_dir(self) -> Path:
        return self.home / ".xpyd"

    @property
    def checkout(self) -> Path:
        return self.home / "xpyd"

    def tool(self, name: str, body: str = "") -> None:
        """Add a program that records its call and then runs `body`."""
        path = self.root / "bin" / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>{self.root}/calls\n{body}\n')
        path.chmod(0o755)

    def python(self, name: str, version: str) -> None:
        self.tool(name, _PYTHON.format(version=version, home=self.home, tools=self.root / "bin"))

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (self.root / "calls").write_text("")
        environment = {"HOME": str(self.home), "PATH": str(self.root / "bin")}
        command = ["bash", str(self.checkout / "deploy" / "ray" / script), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    @property
    def calls(self) -> list[str]:
        return (self.root / "calls").read_text().splitlines()

    def count(self, begin: str) -> int:
        return sum(line.startswith(begin) for line in self.calls)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    for directory in (host.state_dir, host.checkout, tmp_path / "bin"):
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
    """Host whose Python has everything that is needed."""
    host.python("python3.12", "Python 3.12.4")
    for able in ("can-venv", "has-ray"):
        (host.home / able).touch()
    return host


def set_up(host: Host) -> bool:
    """Run setup. Returns whether it installed anything."""
    done = host.run("setup.sh")
    assert done.returncode == 0, done.stderr
    return host.count("pip install") == 1


def test_second_setup_installs_only_changes(bare: Host) -> None:
    assert set_up(bare) and not set_up(bare)
    (bare.checkout / "constraints.txt").write_text("ray==9\n")
    assert set_up(bare) and not bare.count("python3.12 -m venv"), "the environment is good enough for that"
    bare.python("python3.12", "Python 3.12.5")
    assert set_up(bare) and bare.count("python3.12 -m venv") == 1
    assert not set_up(bare)


def test_broken_environment_is_recreated(bare: Host) -> None:
    assert set_up(bare)
    (bare.state_dir / "venv" / "bin" / "python").unlink()
    assert set_up(bare) and not set_up(bare)


def test_setup_uses_the_heads_python_version(bare: Host) -> None:
    bare.python("python3.13", "Python 3.13.1")
    (bare.state_dir / "head-python").write_text("Python 3.12.4\n")
    assert set_up(bare) and bare.count("python3.12 -m venv") == 1
    (bare.state_dir / "head-python").unlink()
    assert set_up(bare) and bare.count("python3.13 -m venv") == 1, "the newest"


def test_setup_reports_missing_requirements(host: Host) -> None:
    host.tool("sudo", "exit 1")
    done = host.run("setup.sh")
    assert done.returncode == 1 and "python3 not found; install Python 3.11 or later" in done.stderr
    host.python("python3.12", "Python 3.12.4")
    host.tool("apt-get", "exit 1")
    done = host.run("setup.sh")
    assert done.returncode == 1 and "install python3.12-venv as root" in done.stderr
    assert not (host.state_dir / "installed").exists()


def test_setup_installs_the_venv_package(bare: Host) -> None:
    (bare.home / "can-venv").unlink()
    bare.tool("sudo", 'shift; "$@"')
    bare.tool("apt-get", f"[ $1 = update ] || touch {bare.home}/can-venv")
    assert set_up(bare)
    assert [line for line in bare.calls if line.startswith("apt-get")] == [
        "apt-get update -qq",
        "apt-get install -qq -y python3.12-venv",
    ]


def test_interrupted_upgrade_is_repeated(bare: Host) -> None:
    assert set_up(bare)
    pip = bare.state_dir / "venv" / "bin" / "pip"
    able = pip.read_text()
    pip.write_text("#!/bin/bash\nexit 1\n")
    (bare.checkout / "constraints.txt").write_text("ray==9\n")
    assert bare.run("setup.sh").returncode == 1
    pip.write_text(able)
    (bare.checkout / "constraints.txt").write_text("")
    assert set_up(bare), "some of it may be of the other version"


def test_profile_gets_a_line_at_the_top_and_keeps_mode_and_link(bare: Host) -> None:
    elsewhere = bare.home / "dotfiles" / "bashrc"
    elsewhere.parent.mkdir()
    elsewhere.write_text("alias l=ls\n")
    elsewhere.chmod(0o640)
    (bare.home / ".bashrc").symlink_to(elsewhere)
    for _ in range(2):
        set_up(bare)
        assert (bare.home / ".bashrc").is_symlink()
        assert elsewhere.read_text() == ". ~/.xpyd/env\nalias l=ls\n"
        assert elsewhere.stat().st_mode & 0o777 == 0o640
    assert (bare.home / ".profile").read_text() == ". ~/.xpyd/env\n"
    assert not (bare.home / ".bash_profile").exists(), "it would hide the other one"


def test_full_disk_leaves_the_profile_unchanged(bare: Host) -> None:
    profile = bare.home / ".bashrc"
    profile.write_text("alias l=ls\n")
    cat = bare.root / "bin" / "cat"
    real = cat.resolve()
    cat.unlink()
    bare.tool(
        "cat",
        f"""
[ "$*" = {profile} ] || exec {real} "$@"
echo alias
exit 1
""",
    )
    done = bare.run("setup.sh")
    assert done.returncode == 1 and f"cannot write {profile}; add '. ~/.xpyd/env' at its top" in done.stderr
    assert profile.read_text() == "alias l=ls\n"
    assert sorted(path.name for path in bare.home.glob(".bash*")) == [".bashrc"]


def test_concurrent_setups_are_serialized(bare: Host) -> None:
    with (bare.state_dir / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        flock = bare.root / "bin" / "flock"
        real = flock.resolve()
        flock.unlink()
        bare.tool("flock", f'[ "$1 $2" = "-w 1800" ] && exec {real} -n $3')
        done = bare.run("setup.sh")
    assert done.returncode == 1 and "another setup.sh has been running" in done.stderr and not bare.count("pip")
    assert set_up(bare)


@contextmanager
def raylet_of(head: str) -> Iterator[int]:
    """Start a process with the arguments of a raylet."""
    command = ["bash", "-c", "read", "raylet", "--head=no", f"--gcs-address={head}:6379", "--labels="]
    # It ends when its stdin closes.
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process.pid


@pytest.fixture
def worker(host: Host) -> Iterator[Host]:
    """Host on which Ray is always running."""
    host.tool("ray", "echo reconnect=$RAY_gcs_rpc_server_reconnect_timeout_s >>$HOME/../calls")
    (host.checkout / "cluster").mkdir()
    for file in (host.checkout / "cluster" / "__init__.py", host.state_dir / "installed", host.root / "labels.yaml"):
        file.touch()
    with raylet_of(_HEAD) as pid:
        host.tool("pgrep", f"echo {pid}")
        yield host


@pytest.fixture
def stored(worker: Host) -> Host:
    """Host with a store on which Ray has been started."""
    (worker.state_dir / "ray-store").write_text("10.0.0.9:6379 secret\n")
    assert "reconnect=600" in join(worker)
    return worker


def join(host: Host, head: str = _HEAD) -> list[str]:
    """Run worker.sh. Returns its calls of Ray."""
    done = host.run("worker.sh", head, f"--labels-file={host.root}/labels.yaml")
    assert done.returncode == 0, done.stderr
    ray_calls = [line for line in host.calls if line.startswith(("ray", "reconnect"))]
    assert ray_calls or "already running" in done.stdout
    return ray_calls


def test_without_a_store_the_worker_restarts(worker: Host) -> None:
    (worker.state_dir / "ray-store").write_text("\n")
    started = f"ray start --address=10.0.0.10:6379 --labels-file={worker.root}/labels.yaml"
    for _ in range(2):
        assert join(worker) == ["ray stop", "reconnect=", started, "reconnect=10"]


@pytest.mark.parametrize(
    "file",
    [
        "xpyd/cluster/__init__.py",
        "xpyd/cluster/cpu/wire.h",
        "xpyd/cluster/simulator/h100.json",
        "xpyd/deploy/ray/worker.sh",
        ".xpyd/installed",
        ".xpyd/ray-token",
        "../labels.yaml",
    ],
)
def test_with_a_store_the_worker_restarts_only_after_changes(stored: Host, file: str) -> None:
    assert join(stored) == []
    path = stored.home / file
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as changed:
        changed.write("# another line\n")
    assert join(stored)
    assert join(stored) == []


def test_removed_or_renamed_code_is_a_change(stored: Host) -> None:
    package = stored.checkout / "cluster"
    (package / "a.py").touch()
    assert join(stored)
    (package / "a.py").rename(package / "b.py")
    assert join(stored)
    (package / "b.py").unlink()
    assert join(stored) and join(stored) == []


def test_another_clone_of_the_same_commit_is_not_a_change(stored: Host) -> None:
    """rsync rewrites a file if only its time differs."""
    for path in [*stored.checkout.rglob("*.py"), *stored.checkout.rglob("*.sh"), stored.state_dir / "installed"]:
        new = path.with_name("new")
        shutil.copyfile(path, new)
        os.utime(new, (1, 1))
        new.rename(path)
    assert join(stored) == []


@pytest.mark.parametrize(
    "file",
    [
        "xpyd/xpyd.egg-info/PKG-INFO",
        "xpyd/cluster/__pycache__/a.cpython-312.pyc",
        "xpyd/cluster/.ruff_cache/a.json",
        "xpyd/on-prem.yaml",
        "xpyd/ann.json",
        "xpyd/tests/test_floors.py",
    ],
)
def test_files_written_by_host_or_operator_are_not_a_change(stored: Host, file: str) -> None:
    path = stored.home / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    assert join(stored) == []


def test_worker_without_ray_or_with_another_head_joins(stored: Host) -> None:
    with raylet_of("10.0.0.1") as other, raylet_of("10.0.0.100") as longer:
        stored.tool("pgrep", f"echo {other}; echo {longer}")
        assert join(stored), "neither is of this head"
        assert join(stored, "10.0.0.1") and join(stored, "10.0.0.1") == []
    assert join(stored, "10.0.0.1"), "it runs no more"
    stored.tool("pgrep", "exit 1")
    assert join(stored, "10.0.0.1"), "there is none"


def test_worker_with_another_python_does_not_join(worker: Host) -> None:
    (worker.state_dir / "head-python").write_text("Python 3.12.4\n")
    (worker.state_dir / "venv" / "bin").mkdir(parents=True)
    python = worker.state_dir / "venv" / "bin" / "python"
    worker.python("python", "Python 3.12.5")
    python.symlink_to(worker.root / "bin" / "python")
    done = worker.run("worker.sh", "10.0.0.10")
    assert done.returncode == 1 and not worker.count("ray")
    assert "it has Python 3.12.5, the head Python 3.12.4" in done.stderr
    worker.python("python", "Python 3.12.4")
    assert join(worker)


def test_stop_stops_the_head_first_and_skips_unreachable_hosts(host: Host) -> None:
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
    *before, first, second = [line for line in host.calls if not line.startswith("python")]
    assert before == ["cluster down --force --name a", "cluster down --force --name b", "ray stop --force"]
    assert "ubuntu@10.0.0.11 ray stop --force" in first and "ubuntu@10.0.0.12 ray stop --force" in second
    assert "a could not be taken down" in done.stderr and "10.0.0.11 does not answer" in done.stderr
