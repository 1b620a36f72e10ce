"""`cluster --address USER@HEAD ...`: run the command on that host over SSH."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from cluster.cli.connection import ADDRESS
from core.types.errors import DeployError, SpecError

# Environment variable: the command that runs `cluster` on the head, such as /opt/xpyd/bin/cluster.
REMOTE_COMMAND = "CLUSTER_REMOTE_COMMAND"

# ssh's own exit code; `cluster` never returns it.
_SSH_FAILED = 255
# Exit code of the remote shell.
_NOT_FOUND = 127
# A host that does not answer ends the command instead of hanging it.
_OPTIONS = ("-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")


def run_over_ssh(address: str, arguments: Sequence[str]) -> NoReturn:
    """Run `cluster` with `arguments` at USER@HEAD and exit with its code. stdin, stdout and stderr pass through.

    `deploy` uses the Ray that runs there, and spec files of that host. Raises SpecError, and DeployError if ssh is
    missing, the host is unreachable, or it has no `cluster`.
    """
    host, _, port = address.rpartition(":")
    if ":" not in host and port.isdigit():
        raise SpecError(
            f"--address {address}: ssh takes USER@HOST without Ray's port; write {host} "
            f"(or ssh://{address}, if {port} is the port of its sshd)"
        )
    program = shlex.split(os.environ.get(REMOTE_COMMAND) or "cluster")
    # A CLUSTER_ADDRESS on the head could name the head again, and the command would call itself forever.
    remote = ["env", "-u", ADDRESS, *program, *_remote_arguments(address, arguments)]
    # Without a terminal, ssh must fail instead of asking for a password.
    mode = ("-t",) if sys.stdin.isatty() and sys.stdout.isatty() else ("-o", "BatchMode=yes")
    try:
        code = subprocess.run(["ssh", *mode, *_OPTIONS, "--", address, shlex.join(remote)], check=False).returncode
    except FileNotFoundError:
        raise DeployError(f"--address {address}: ssh is not installed; install it (Debian: openssh-client)") from None
    if code == _SSH_FAILED:
        raise DeployError(f"--address {address}: ssh failed; try `ssh {address} true`")
    if code == _NOT_FOUND:
        raise DeployError(
            f"--address {address}: {program[0]} was not found there; set {REMOTE_COMMAND} to its path on that host"
        )
    raise typer.Exit(code if code >= 0 else 128 - code)


def _remote_arguments(address: str, arguments: Sequence[str]) -> list[str]:
    if arguments[0] != "deploy":
        return list(arguments)
    local = [word for word in arguments[1:] if word.endswith((".yaml", ".yml")) and os.path.isfile(word)]
    if local:
        raise SpecError(
            f"{local[0]} is a local file, but the command runs at {address}; run `scp {local[0]} {address}:`, "
            f"then `ssh -t {address} cluster deploy {os.path.basename(local[0])} --address auto`"
        )
    has_ray = any(word.partition("=")[0] == "--address" for word in arguments)
    return [*arguments, *(() if has_ray else ("--address", "auto"))]
