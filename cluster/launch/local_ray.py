"""Local Ray, bound to loopback, for a deployment without --address.

This Ray is an ordinary `ray start --head --block`, detached from the command that started it. A mark in the environment
of its processes identifies them, so no pid can go stale and no other Ray is ever stopped.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.process import processes
from core.process.ports import free_port
from core.types.errors import DeployError

START_S = 90.0
_STOP_S = 10.0
_PAUSE_S = 0.05
# We do not use the object store; Ray requires at least 75 MB.
_OBJECT_STORE_BYTES = 100_000_000
_TMP = "/tmp"
# Paths of sockets have at most 107 bytes; /xpyd-ray-…/ray/session_…/sockets/plasma_store takes 86 of them.
_MAX_TEMP_DIR = 21
_MARK = "XPYD_LOCAL_RAY"
_READY = b"Ray runtime started"
# Message of Ray's own startup deadline, 30 s.
_LATE = b"node timed out during startup"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class LocalRay:
    """Address of a local Ray. Stored in the deployment's state, so that later commands find it."""

    temp_dir: str
    port: int  # of its control store

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for Ray's own processes and every driver."""
        return {
            # Loopback is open to every user of the machine.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            # Otherwise Ray replaces 127.0.0.1 by a network address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
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
        """Variable that every process of this Ray has in its environment."""
        return f"{_MARK}={self.temp_dir}"


def prepare() -> LocalRay:
    """Choose a directory and a port without starting anything. Store the result first, so that stop() always works."""
    return LocalRay(f"{_temporary_dir()}/xpyd-ray-{secrets.token_hex(4)}", free_port())


def start(local: LocalRay, *, log: Path) -> None:
    """Start the local Ray and return once it accepts drivers.

    On failure raises DeployError with Ray's message, and nothing keeps running.
    """
    try:
        # The directory is private; Ray makes its own accessible to all users.
        Path(local.temp_dir).mkdir(mode=0o700)
    except OSError as error:
        raise DeployError(
            f"{local.temp_dir}: {error.strerror}; set TMPDIR to a writable directory, in ASCII and at most "
            f"{_MAX_TEMP_DIR} characters long"
        ) from None
    local._token.touch(mode=0o600)
    local._token.write_text(secrets.token_hex(32), encoding="utf-8")
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
        "RAY_START_HOOK": "cluster.launch.local_ray.disable_client_server",
        # Ray takes 30 s to end otherwise.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Workers should not yield to other processes of this machine.
        "RAY_worker_niceness": "0",
    }
    deadline = time.monotonic() + START_S
    process = _spawn(command, environment, log)
    while _READY not in log.read_bytes():
        has_ended, is_late = process.poll() is not None, time.monotonic() > deadline
        if has_ended and not is_late and _LATE in log.read_bytes():
            # Ray gives up after 30 s, which may be too short on a busy machine: try again.
            processes.end(local.mark, grace_s=_STOP_S)
            process = _spawn(command, environment, log)
        elif has_ended or is_late:
            stop(local)
            raise DeployError(_why_not(log, has_ended=has_ended))
        time.sleep(_PAUSE_S)


def stop(local: LocalRay) -> None:
    """Stop the local Ray with everything that runs in it. Returns when no process is left. Idempotent."""
    processes.end(local.mark, grace_s=_STOP_S)
    shutil.rmtree(local.temp_dir, ignore_errors=True)


def join(local: LocalRay) -> None:
    """Set the environment for a driver of this Ray. Call this before importing Ray, which reads some of it."""
    is_set = local.environment.items() <= os.environ.items()
    assert is_set or "ray" not in sys.modules, "Ray was imported before local_ray.join()"
    os.environ.update(local.environment)


def disable_client_server(parameters: Any, is_head: bool) -> None:
    """Disable Ray's client server, via its start hook: `ray start` has no such option, and all Rays would share port
    10001."""
    parameters.ray_client_server_port = None


def _temporary_dir() -> str:
    """Return the user's temporary directory, or /tmp if its path is too long for Ray or is not ASCII."""
    try:
        usual = tempfile.gettempdir()
    except FileNotFoundError:  # none is writable
        return _TMP
    return usual if usual.isascii() and len(usual) <= _MAX_TEMP_DIR else _TMP


def _spawn(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _why_not(log: Path, *, has_ended: bool) -> str:
    if not has_ended or _LATE in log.read_bytes():
        return f"Ray did not start in time; retry when this machine is less busy (log: {log})"
    text = _COLOURS.sub("", log.read_text(encoding="utf-8", errors="replace")).strip()
    last_line = text.splitlines()[-1].strip() if text else "no output"
    return f"Ray did not start: {last_line} (full log: {log})"
