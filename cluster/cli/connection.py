"""Connections to a deployment: from its name to its state, a Ray driver and the controller's handle, or over SSH.

Commands call this before they import Ray or anything that imports it: see local_ray.join().
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from cluster.launch import local_ray
from cluster.launch import state as states
from cluster.launch.state import State
from core.types.errors import DeployError, SpecError

# Environment variable: address of a Ray to use instead of this user's deployments on this machine.
ADDRESS = "CLUSTER_ADDRESS"
# Environment variable: the command that runs `cluster` on the head, such as /opt/xpyd/bin/cluster.
REMOTE_COMMAND = "CLUSTER_REMOTE_COMMAND"

# ssh's own exit code; `cluster` never returns it.
_SSH_FAILED = 255
# Exit code of the remote shell.
_NOT_FOUND = 127
# A host that does not answer ends the command instead of hanging it.
_OPTIONS = ("-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")


def find_state(name: str | None, *, to_remove: bool = False) -> State:
    """Return the deployment called `name`, or the only one: of this machine's user or, with an address, of that Ray.

    to_remove: also return a partial deployment. Raises NotDeployed, SpecError if there are several, and DeployError if
    no Ray answers there.
    """
    address = os.environ.get(ADDRESS)
    if not address:
        return states.find(name)
    from cluster.launch import remote

    return remote.find_any(address, name) if to_remove else remote.find(address, name)


def ask_deployed(name: str | None, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the controller of the deployment called `name`.

    Raises what find_state, join_controller and cluster.launch.driver.ask raise.
    """
    controller = join_controller(find_state(name))
    from cluster.launch import driver

    return driver.ask(controller, method, *args, **kwargs)


def join_controller(state: State) -> Any:
    """Become a driver of the deployment's Ray. Returns the controller's handle, for cluster.launch.driver.ask.

    Raises DeployError if Ray or the controller does not answer.
    """
    if state.joined_ray is not None:
        local_ray.join(state.joined_ray)
    from cluster.launch import driver

    driver.connect(state.ray_address, state.name)
    controller = driver.find_controller(state.name)
    if controller is None:
        raise DeployError(f"{state.name}: no controller on Ray at {state.ray_address}; run `cluster down`")
    return controller


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
