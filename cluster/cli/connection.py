"""Connections to a deployment: its state by name, its controller and its routers; or by SSH to its head.

Commands call these functions before they import Ray or anything that imports it: see local_ray.join().
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import urllib.parse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from cluster.launch import local_ray
from cluster.launch import state as states
from cluster.launch.state import State
from core.types.errors import ClusterError, DeployError, SpecError

if TYPE_CHECKING:  # Ray must not be imported before local_ray.join()
    from cluster.launch.router_admin import AdminAnswer
    from core.spec.schema import Spec
    from core.trace.traffic import ReplicaReport
    from core.wire.client_access import EndpointAccess

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
    """Return the deployment called `name`, or the only one, on this machine or, with an address, on that Ray.

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

    Raises what find_state, join_controller and ask raise.
    """
    return ask(join_controller(find_state(name)), method, *args, **kwargs)


def ask(controller: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a controller. Raises what cluster.launch.driver.ask raises."""
    from cluster.launch import driver

    return driver.ask(controller, method, *args, **kwargs)


def join_controller(state: State) -> Any:
    """Become a driver of the deployment's Ray. Returns the controller's handle, for ask().

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


def learned_by(state: State) -> tuple[Spec, list[ReplicaReport]]:
    """Return the current spec of a deployment, and its replicas with the rates that they have learned."""
    controller = join_controller(state)
    from core.spec.schema import Spec
    from core.trace.traffic import ReplicaReport

    spec = Spec.model_validate(ask(controller, "status")["spec"])
    return spec, [ReplicaReport.of(tree) for tree in ask(controller, "autoscaling")["replicas"]]


def open_access(name: str | None, endpoint: str | None, api_key: str | None) -> tuple[State | None, EndpointAccess]:
    """Return the state of a deployment and the access to its endpoints; no state if an `endpoint` is given instead."""
    state = None if endpoint else find_state(name)
    return state, access_to(state, api_key)


def access_to(state: State | None, api_key: str | None) -> EndpointAccess:
    """Return access to a deployment's endpoints. state=None: to an endpoint given by its address."""
    from core.wire.client_access import EndpointAccess

    if state is None:
        return EndpointAccess(api_key=api_key)
    if not api_key and state.needs_keys:
        from cluster.launch import operator_key

        api_key = operator_key.read(state.endpoints or state.name)
    is_tls = state.http.startswith("https://")
    return EndpointAccess(api_key=api_key, certificate=state.certificate, is_tls=is_tls, model=state.model)


def ask_routers_of(name: str | None, admin: str | None, path: str) -> list[AdminAnswer]:
    """GET `path` from the admin port at `admin`; if None, from every router of deployment `name` (None: the only one).

    Returns at least one response, else raises ClusterError.
    """
    from cluster.launch.router_admin import ask_at, ask_routers

    if admin:
        answers = ask_at(admin, path)
    else:
        state = find_state(name)
        if state.joined_ray is None:
            join_controller(state)
        answers = ask_routers(state, path)
    if not answers:
        raise ClusterError("no router answers; see `cluster status`")
    return answers


def remembered(name: str | None, admin: str | None, path: str, request_id: str) -> dict[str, Any]:
    """GET `path` and the request id from the router that served the request.

    Raises ClusterError if no router knows it.
    """
    answers = ask_routers_of(name, admin, path + urllib.parse.quote(request_id, safe=""))
    found = [tree for answer in answers if answer.status == 200 and (tree := answer.json())]
    if not found:
        raise ClusterError(
            f"no router remembers request {request_id}: each keeps its last 1,000, by the id in `generate --json`, "
            "in the X-Request-Id header, or in an answer"
        )
    return found[0]


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
