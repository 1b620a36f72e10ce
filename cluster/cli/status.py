"""`cluster status`: state of a deployment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from cluster.cli.connection import find_state, join_controller
from cluster.cli.console import columns
from cluster.cli.deploy import TLS_IS_OFF
from cluster.cli.options import AsJson, Name
from core.types.errors import DeployError, NotDeployed

if TYPE_CHECKING:  # Ray must not be imported before local_ray.join()
    from cluster.control.replica import RevisionReport
    from cluster.launch.state import State
    from cluster.launch.status import DeploymentReport

_NOT_READY, _NOTHING_DEPLOYED = 1, 3


def status(name: Name = None, as_json: AsJson = False) -> None:
    """Show all replicas. Exit code: 0 ready, 1 degraded or not ready, 3 nothing deployed."""
    state = None
    try:
        state = find_state(name)
        if state.joined_ray is not None and not state.joined_ray.is_running:
            raise NotDeployed(f"{state.name} is no longer running; run `cluster down` to remove its state")
        controller = join_controller(state)
        from cluster.launch.status import read_status

        report = read_status(state, controller)
    except NotDeployed as nothing:
        typer.echo(f"cluster: {nothing}", err=True)
        raise typer.Exit(_NOTHING_DEPLOYED) from None
    except DeployError as error:
        typer.echo(f"cluster: {error}", err=True)
        if state is not None and state.joined_ray is not None:
            for line in _seen_without_ray(state):
                typer.echo(line, err=True)
        raise typer.Exit(_NOT_READY) from None
    print(json.dumps(report, indent=1) if as_json else as_text(report))
    raise typer.Exit(0 if report["ready"] else _NOT_READY)


def _seen_without_ray(state: State) -> list[str]:
    """Return the reports of this machine's routers, which keep serving without Ray's control plane."""
    from cluster.launch.endpoints import openai_urls
    from cluster.launch.router_admin import ask_here

    routers = ask_here(state.name, state.admin, "/health")
    counts = (" ".join(f"{role} {count}" for role, count in (one.replicas() or {}).items()) for one in routers)
    lines = [f"the router at {one.where} serves with {seen}" for one, seen in zip(routers, counts, strict=True)]
    return [*lines, f"gRPC {state.grpc} · OpenAI {openai_urls(state.http)}"] if lines else ["no router answers"]


def _update_lines(revision: RevisionReport) -> list[str]:
    """Describe the running update, or the outcome of the last one."""
    if update := revision["update"]:
        why = f" ({update['reason']})" if update["reason"] else ""
        share = f"{update['share']:.0%} of the requests go to it"
        return [f"update to revision {update['revision']}: {update['phase']}{why}: {update['step']}; {share}"]
    last = revision["last_update"]
    return [f"revision {revision['number']}; the last update: {last}"] if last else []


def as_text(report: DeploymentReport) -> str:
    from cluster.launch.endpoints import openai_urls

    rows = [["REPLICA", "STATE", "NODE", "DEVICES", "BLOCKS", "FREE", "CACHED", "RUNNING", "WAITING", ""]]
    notes = list(report["missing"])
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
            notes.append("replicas failed to start too often; run `cluster scale` to retry")
    notes += _update_lines(report["revision"])
    if report["tls"] == "off":
        notes.append(TLS_IS_OFF)
    state = "ready" if report["ready"] else "degraded" if report["serving"] else "not ready"
    ready_counts = " ".join(f"{role} {pool['ready']}/{pool['desired']}" for role, pool in report["pools"].items())
    ends = report["endpoints"]
    endpoints = (
        f" · gRPC {ends['grpc']} · OpenAI {openai_urls(ends['http'])} · admin {', '.join(ends['admin']) or 'none'}"
    )
    return "\n".join([f"{report['name']} is {state}: {ready_counts}{endpoints}", columns(rows), *notes])
