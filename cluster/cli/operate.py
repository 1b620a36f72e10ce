"""`cluster status`, `scale`, `drain` and `logs`: looking after a deployment that is up."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster import local_ray
from cluster import state as states
from cluster.cli.deploy import Name
from cluster.errors import DeployError, SpecError

if TYPE_CHECKING:
    from cluster.state import State

_NOT_READY, _NOTHING_DEPLOYED = 1, 3
_FOLLOW_S = 0.5
_SEE_ALL_S = 60.0
_SIZE = re.compile(r"(prefill|decode)=([0-9]+)")


def status(
    name: Name = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show every replica. Exit code: 0 ready, 1 not ready, 3 nothing deployed."""
    try:
        state = states.find(name)
        if state.local_ray is not None and not state.local_ray.is_running:
            raise states.NotDeployed(f"{state.name} is not running any more; `cluster down` forgets it")
    except states.NotDeployed as nothing:
        typer.echo(f"cluster: {nothing}", err=True)
        raise typer.Exit(_NOTHING_DEPLOYED) from None
    try:
        _join(state)
        from cluster.status import read_status

        report = read_status(state)
    except DeployError as error:
        typer.echo(f"cluster: {error}", err=True)
        raise typer.Exit(_NOT_READY) from None
    print(json.dumps(report, indent=1) if as_json else _as_text(report))
    raise typer.Exit(0 if report["ready"] else _NOT_READY)


def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="prefill=N decode=N", help="The new number of replicas.")],
    name: Name = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds; default timeouts.start_s + timeouts.drain_s.")] = None,
    wait_for_nodes: Annotated[
        bool, typer.Option(help="Wait for nodes that an autoscaler has yet to add, instead of refusing.")
    ] = False,
) -> None:
    """Change the size of one pool or both, and return when it is done.

    A replica that leaves takes no new requests and finishes those that it has; the other pool is not touched.
    """
    wanted = _parse_sizes(sizes)
    begin = time.monotonic()
    controller = _controller(name)
    from cluster.driver import ask

    changes = ask(controller, "scale", wanted, wait_for_nodes=wait_for_nodes)
    _await(controller, roles=tuple(wanted), timeout=timeout, name=name)
    what = ", ".join(f"{role} {before} -> {after}" for role, (before, after) in changes.items())
    print(f"scaled {what} in {time.monotonic() - begin:.1f} s")


def drain(
    replica: Annotated[str, typer.Argument(help="Such as decode-1; see `cluster status`.")],
    name: Name = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds; default timeouts.start_s + timeouts.drain_s.")] = None,
) -> None:
    """Let one replica finish its requests and leave; a fresh one takes its place. Returns when both are done.

    The pool keeps its size: to make it smaller, use `cluster scale`.
    """
    begin = time.monotonic()
    controller = _controller(name)
    from cluster.driver import ask

    role = replica.partition("-")[0]
    ask(controller, "drain", replica)
    pools = _await(controller, roles=(role,), timeout=timeout, name=name)
    newest = max((entry["id"] for entry in pools[role]["replicas"]), key=_number, default="none")
    print(f"{replica} has left, {newest} serves in its place, after {time.monotonic() - begin:.1f} s")


def logs(
    replica: Annotated[str, typer.Argument(help="Such as decode-1; also one that is gone.")],
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Of each rank.")] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    name: Name = None,
) -> None:
    """Show the last lines that a replica has written."""
    controller = _controller(name)
    from cluster.driver import ask

    parts = ask(controller, "logs", replica, lines=lines)
    while True:
        for rank, part in sorted(parts.items()):
            prefix = f"{rank}| " if len(parts) > 1 else ""
            for line in part.text.splitlines():
                print(prefix + line, flush=True)
        if not follow:
            return
        time.sleep(_FOLLOW_S)
        parts = ask(controller, "logs", replica, starts={rank: part.end for rank, part in parts.items()})


def _join(state: State) -> None:
    """Become a driver of the deployment's Ray. Raises DeployError."""
    if state.local_ray is not None:
        local_ray.join(state.local_ray)
    from cluster import driver

    driver.connect(state.ray_address, state.name)


def _controller(name: str | None) -> Any:
    state = states.find(name)
    _join(state)
    from cluster import driver

    controller = driver.find_controller(state.name)
    if controller is None:
        raise DeployError(f"{state.name}: its controller is gone from Ray at {state.ray_address}; run `cluster down`")
    return controller


def _await(controller: Any, *, roles: tuple[str, ...], timeout: float | None, name: str | None) -> dict[str, Any]:
    """Until the pools named have what they should have, and the router knows."""
    from cluster.cli.console import reporter
    from cluster.driver import ask
    from cluster.pool_watch import all_ready, await_pools
    from cluster.router_health import await_seen

    timeouts = ask(controller, "status")["spec"]["timeouts"]
    deadline = time.monotonic() + (timeout or timeouts["start_s"] + timeouts["drain_s"])
    with reporter() as report:
        pools = await_pools(
            controller,
            until=lambda pools: all_ready({role: pools[role] for role in roles}),
            deadline=deadline,
            reporter=report,
            roles=roles,
        )
    await_seen(states.find(name).http, {role: pools[role]["desired"] for role in roles}, within_s=_SEE_ALL_S)
    return pools


def _parse_sizes(sizes: list[str]) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for size in sizes:
        match = _SIZE.fullmatch(size)
        if match is None or match[1] in wanted:
            raise SpecError(f"scale {' '.join(sizes)}: write prefill=N, decode=N or both")
        wanted[match[1]] = int(match[2])
    return wanted


def _as_text(report: dict[str, Any]) -> str:
    from cluster.cli.console import columns

    rows = [["REPLICA", "STATE", "NODE", "DEVICES", "BLOCKS", "FREE", "CACHED", "RUNNING", "WAITING", ""]]
    notes = []
    for pool in report["pools"].values():
        for replica in pool["replicas"]:
            blocks = replica["blocks"]
            devices = ",".join(rank["device"] for rank in replica["ranks"])
            numbers = [blocks["total"], blocks["free"], blocks["cached"], replica["running"], replica["waiting"]]
            cells = [replica["id"], replica["state"], replica["node"], devices, *map(str, numbers), replica["stage"]]
            rows.append(cells)
        if pool["ready"] < pool["desired"] and pool["failures"]:
            notes.append(pool["failures"][-1]["text"])
        if pool["has_given_up"]:
            notes.append("it failed to start too often and is not tried again until `cluster scale`")
    ready = "ready" if report["ready"] else "not ready"
    wanted = " ".join(f"{role} {pool['ready']}/{pool['desired']}" for role, pool in report["pools"].items())
    doors = f"gRPC {report['endpoints']['grpc']} · OpenAI {report['endpoints']['http']}/v1"
    return "\n".join([f"{report['name']} is {ready}: {wanted} · {doors}", columns(rows), *notes])


def _number(replica: str) -> int:
    return int(replica.rpartition("-")[2])
