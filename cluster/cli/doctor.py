"""`cluster doctor`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.connection import ADDRESS, find_state, join_controller

if TYPE_CHECKING:
    from cluster.doctor.finding import Finding


def doctor(
    topology: Annotated[
        str | None,
        typer.Argument(metavar="[FILE|2P4D]", help="What is to be deployed; otherwise what is deployed is looked at."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Which deployment; needed only when there are several.")] = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar=[ADDRESS, "RAY_ADDRESS"],
            help="HOST:PORT of a Ray cluster, or auto, whose hosts are looked at; otherwise this machine alone.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Look at every host for what a deployment would fail on, and say how to mend each.

    Room for all replicas, ports, versions, clocks, memory, disks, limits, Redis, certificates, the network, GPUs, their
    driver, NCCL, NIXL and RDMA. Nothing is changed. Exit code 1: there is a problem.
    """
    from cluster.doctor.finding import Severity
    from core.spec.loader import load_spec, parse_spec

    if topology is None:
        state = find_state(name)
        controller = join_controller(state)
        from cluster.launch import driver

        spec, has_ray = parse_spec(driver.ask(controller, "status")["spec"], origin="the stored spec"), True
    else:
        spec, has_ray = load_spec(topology), address is not None
        if address is not None:
            from cluster.launch import driver

            driver.connect(address, spec.name)
    from cluster.control.placement import live_nodes
    from cluster.doctor.examine import examine_here, examine_nodes

    if has_ray:
        hosts, found = examine_nodes(spec, live_nodes(), is_deployed=topology is None)
    else:
        hosts, found = examine_here(spec)
    if as_json:
        print(json.dumps({"hosts": [asdict(host) for host in hosts], "findings": [asdict(one) for one in found]}))
    else:
        print("\n".join(_lines(len(hosts), found)))
    return 1 if any(one.severity is Severity.PROBLEM for one in found) else 0


def _lines(num_hosts: int, found: Sequence[Finding]) -> Iterator[str]:
    for one in found:
        yield f"{one.severity}: {one.host or 'all hosts'}: {one.check}: {one.found}"
        yield f"    {one.fix}"
    hosts = "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
    yield f"{hosts} looked at, {len(found) or 'nothing'} found"
