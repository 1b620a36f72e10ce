"""A Ray of our own, on this machine's loopback, for a deployment that was not told to use another.

It is an ordinary `ray start --head --block`, detached from the command that started it. It is found again, and taken
down, by a mark in the environment of each of its processes: no pid to go stale, and nobody else's Ray is ever touched.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.process import processes
from core.process.ports import free_port
from core.types.errors import DeployError

START_S = 90.0
_STOP_S = 10.0
_PAUSE_S = 0.05
_OBJECT_STORE_BYTES = 100_000_000  # nothing of ours goes through it; Ray wants at least 75 MB
_MARK = "XPYD_LOCAL_RAY"
_READY = b"Ray runtime started"
_LATE = b"node timed out during startup"  # by a deadline of Ray's own, of 30 s
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class LocalRay:
    """Where a Ray of ours lives. Kept in the deployment's state, so that any later command finds it."""

    temp_dir: str  # under /tmp: Ray puts sockets into it, whose paths may have 107 bytes
    port: int  # of its control store

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What Ray's own processes and every driver must have in their environment."""
        return {
            "RAY_AUTH_MODE": "token",  # loopback is open to every user of the machine
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise Ray replaces 127.0.0.1 by an address of the network
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    @property
    def is_running(self) -> bool:
        return processes.leader(self.mark) is not None

    @property
    def _token(self) -> Path:
        return Path(self.temp_dir) / "token"

    @property
    def mark(self) -> str:
        """What every process of it carries in its environment."""
        return f"{_MARK}={self.temp_dir}"


def prepare() -> LocalRay:
    """Choose a place and a port; nothing runs yet. Remember it first: then stop() works whatever comes."""
    return LocalRay(tempfile.mkdtemp(prefix="xpyd-ray-"), free_port())


def start(local: LocalRay, *, log: Path) -> None:
    """Start it and return when it takes drivers. Raises DeployError with what Ray said, and leaves nothing running."""
    local._token.touch(mode=0o600)  # in a directory that is ours alone; Ray opens its own to everybody
    local._token.write_text(secrets.token_hex(32))
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address=127.0.0.1", f"--port={local.port}", f"--temp-dir={local.temp_dir}/ray"),
        *("--include-dashboard=false", "--include-log-monitor=false", "--no-monitor"),
        *(f"--num-cpus={os.cpu_count()}", f"--object-store-memory={_OBJECT_STORE_BYTES}", "--disable-usage-stats"),
    ]
    environment = {
        **os.environ,
        **local.environment,
        _MARK: local.temp_dir,
        "RAY_START_HOOK": "cluster.launch.local_ray.leave_out_client_server",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # otherwise it takes 30 s to end
        "RAY_worker_niceness": "0",  # the workers are what this machine is for
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + START_S
    while _READY not in log.read_bytes():
        has_ended = process.poll() is not None
        if has_ended or time.monotonic() > deadline:
            stop(local)
            raise DeployError(_why_not(log, has_ended=has_ended))
        time.sleep(_PAUSE_S)


def stop(local: LocalRay) -> None:
    """Take it down, with everything that runs in it; returns when no process is left. Works at any time, and twice."""
    processes.end(local.mark, grace_s=_STOP_S)
    shutil.rmtree(local.temp_dir, ignore_errors=True)


def join(local: LocalRay) -> None:
    """Make this process fit to be a driver of it. Ray reads some of this while it is imported: so before that."""
    is_set = local.environment.items() <= os.environ.items()
    assert is_set or "ray" not in sys.modules, "Ray was imported before local_ray.join()"
    os.environ.update(local.environment)


def leave_out_client_server(parameters: Any, is_head: bool) -> None:
    """Ray's start hook: `ray start` has no option that says "no client server", and its port 10001 is one for all."""
    parameters.ray_client_server_port = None


def _why_not(log: Path, *, has_ended: bool) -> str:
    if has_ended and _LATE not in log.read_bytes():
        return f"Ray did not start: {_last_line(log)} (all of it: {log})"
    return f"Ray did not start in time: try again when this machine has less to do (what Ray said: {log})"


def _last_line(log: Path) -> str:
    lines = [line for line in _COLOURS.sub("", log.read_text(errors="replace")).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
