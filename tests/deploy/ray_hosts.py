"""Hosts on this machine for `ray up` (see hosts.sh), and an operator with their key."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.support import hosts as network
from tests.support.slow_cable import Slowness, slow_cable

ROOT = Path(__file__).parents[2]
_SCRIPT = Path(__file__).with_name("hosts.sh")
_USER = 1500
_PATH = "/usr/local/bin:/usr/bin:/bin"  # as set by the script for a host's sshd
_BRIDGE, GATEWAY = "xpydtest0", "10.78.0.1"  # as in the script
_SSH = ["-q", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "ConnectTimeout=5"]


def why_not() -> str:
    """Return what this machine lacks for the hosts; empty if nothing."""
    lacking = [
        tool for tool in ("sshd", "rsync", "ip", "unshare") if shutil.which(tool, path="/usr/sbin:/usr/bin") is None
    ]
    if lacking:
        return f"needs {', '.join(lacking)}"
    return "" if network.can_be_made() else "needs root, and namespaces that it may make"


@dataclass(frozen=True)
class Hosts:
    """Test hosts; the first is the head. They share this process's Python environment read-only, as if installed."""

    directory: Path
    addresses: Mapping[str, str]  # by name
    # Label by name; the head has none.
    pools: Mapping[str, str]
    # Hosts have only this machine's /usr and /opt.
    is_bare: bool = False

    def start(self, *names: str) -> None:
        places = {str(ROOT), sys.prefix, str(Path(sys.executable).resolve().parents[1])}
        places |= {path for path in sys.path if path.endswith("site-packages")}
        outermost = sorted(p for p in places if not any(p != q and p.startswith(f"{q}/") for q in places))
        if self.is_bare:
            outermost = []
        hosts = [f"{name}:{self.addresses[name]}" for name in names or self.addresses]
        self._run("up", *hosts, env=os.environ | {"BIND": ":".join(outermost)})

    def prepare(self, cache: Path) -> None:
        """Prepare the Python set-up with its marker file on each host, the models and kernels of `cache`, and the
        labels."""
        digest = hashlib.sha256(b"".join((ROOT / file).read_bytes() for file in ("pyproject.toml", "constraints.txt")))
        found = (shutil.which(f"python3{minor}", path=_PATH) for minor in (".13", ".12", ".11", ""))
        python = next(path for path in found if path)
        digest.update(subprocess.run([python, "-V"], check=True, capture_output=True, timeout=10).stdout)
        for number, name in enumerate(self.addresses):
            home = self.directory / "hosts" / name / "home" / "ubuntu"
            (home / ".xpyd").mkdir()
            (home / ".xpyd" / "venv").symlink_to(sys.prefix)
            (home / ".xpyd" / "installed").write_text(f"{digest.hexdigest()}  -\n")
            written_by_pip = home / "xpyd" / "xpyd.egg-info" / "PKG-INFO"
            written_by_pip.parent.mkdir(parents=True)
            written_by_pip.touch()
            os.utime(written_by_pip, (number, number))
            # Converted from a GGUF, whose path is part of it.
            imported = shutil.ignore_patterns("gguf")
            shutil.copytree(cache, home / ".cache" / "xpyd", ignore=imported)
            for path in (home, *home.rglob("*")):
                os.chown(path, _USER, _USER, follow_symlinks=False)
            if name in self.pools:
                labels = self.directory / "hosts" / name / "etc" / "xpyd" / "labels.yaml"
                labels.parent.mkdir()
                labels.write_text(f"pool: {self.pools[name]}\n")

    def send(self, directory: Path, to: str) -> None:
        """Copy a checkout into every home, like `ray up`."""
        for address in self.addresses.values():
            shell = " ".join(["ssh", "-i", str(self.directory / "key"), *_SSH])
            what = ["--exclude=.git", "--exclude=.venv*", f"{directory}/", f"ubuntu@{address}:{to}/"]
            subprocess.run(["rsync", "-a", "-e", shell, *what], check=True, capture_output=True, timeout=120)

    def cut_power(self, name: str) -> None:
        self._run("kill", name)

    def end(self) -> None:
        self._run("down")

    def cut_cable(self, name: str) -> None:
        """Disconnect the network without notice; the host keeps running."""
        _ip("link", "set", f"x-{name}", "down")

    def reconnect_cable(self, name: str) -> None:
        _ip("link", "set", f"x-{name}", "up")

    @contextmanager
    def slow(self, name: str, slowness: Slowness) -> Iterator[None]:
        """Send all traffic of a host over a slow link, with CUBIC as most hosts use."""
        pid = (self.directory / "hosts" / name / "sshd.pid").read_text().strip()
        usual = ["scope", "link", "src", self.addresses[name], "congctl", "cubic"]
        route = ["ip", "route", "replace", "10.78.0.0/24", "dev", "eth0", "proto", "kernel", *usual]
        subprocess.run(["nsenter", "-t", pid, "-n", *route], check=True, capture_output=True, timeout=10)
        near, far, bridge = f"n-{name}", f"f-{name}", f"y-{name}"
        with slow_cable(near, far, slowness):
            _ip("link", "add", bridge, "type", "bridge")
            try:
                for interface, joined in ((near, _BRIDGE), (far, bridge), (f"x-{name}", bridge)):
                    _ip("link", "set", interface, "master", joined, "up")
                _ip("link", "set", bridge, "up")
                yield
            finally:
                _ip("link", "set", f"x-{name}", "master", _BRIDGE)
                _ip("link", "delete", bridge)

    def ssh(self, name: str, command: str, *, within_s: float = 120) -> str:
        """Run a command in a shell that is neither login nor interactive. Returns stdout; raises CalledProcessError."""
        target = ["-i", str(self.directory / "key"), f"ubuntu@{self.addresses[name]}", command]
        done = subprocess.run(["ssh", *_SSH, *target], capture_output=True, text=True, timeout=within_s)
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    def processes(self, name: str) -> list[str]:
        """Return the user's processes on the host, without this query."""
        lines = self.ssh(name, "ps -u ubuntu -o args=").splitlines()
        return [line for line in lines if not line.startswith(("sshd:", "ps -u ubuntu"))]

    def received_bytes(self, name: str) -> int:
        return int(Path(f"/sys/class/net/x-{name}/statistics/tx_bytes").read_text())

    def cluster_file(self, *, store: str) -> Path:
        """Write deploy/ray/on-prem.yaml with these hosts, their key and Ray's store, as an operator would."""
        config = yaml.safe_load((ROOT / "deploy" / "ray" / "on-prem.yaml").read_text())
        head, *workers = self.addresses.values()
        config["provider"] |= {"head_ip": head, "worker_ips": workers}
        config["auth"]["ssh_private_key"] = str(self.directory / "key")
        # Ray gives each agent 15 s to start, so hosts that share two cores are started one after the other.
        [start] = config["worker_start_ray_commands"]
        config["worker_start_ray_commands"] = [f"flock -o {ROOT / 'pyproject.toml'} {start}"]
        *before, no_store = config["head_setup_commands"]
        config["head_setup_commands"] = [*before, no_store.replace("''", f"'{store}'")]
        path = self.directory / "cluster.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def ray(self, verb: str, *arguments: str, within_s: float = 300) -> str:
        """Run `ray up`, `exec` or `down` with the cluster file, as an operator with a separate home and /tmp."""
        home = self.directory / "operator"
        home.mkdir(exist_ok=True)
        environment = os.environ | {"HOME": str(home), "RAY_TMPDIR": str(home), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "ray.scripts.scripts", verb, *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=within_s,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"ray {verb}: {done.stdout[-3000:]} {done.stderr[-3000:]}"
        return done.stdout

    def _run(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        verb, *rest = arguments
        done = subprocess.run(
            [_SCRIPT, verb, self.directory, *rest], env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)
