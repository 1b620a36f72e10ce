"""`cluster deploy` and `cluster down`."""

from __future__ import annotations

import os
import signal
import time
from typing import Annotated, Any

import typer

from cluster.cli.connection import ADDRESS, find_state
from cluster.cli.console import reporter
from cluster.cli.options import Name, WaitForNodes
from cluster.launch import state as states
from core.types.errors import DeployError, NotDeployed

TLS_IS_OFF = (
    "security.tls is off: processes communicate unencrypted and accept commands from anyone who reaches their ports"
)
_INTERRUPT_S = 120.0


def deploy(
    topology: Annotated[str, typer.Argument(metavar="FILE|2P4D", help="A YAML file, or a topology such as 2P4D.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field of the spec, e.g. decode.replicas=3."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="pypi:NAME, hf:ORG/NAME, a directory or a .gguf file.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the deployment.")] = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar=[ADDRESS, "RAY_ADDRESS"], help="HOST:PORT of a Ray cluster, or auto; default: start a local Ray."
        ),
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Default 50051.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Default 8000.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Deadline in seconds; default: timeouts.start_s of the spec.")
    ] = None,
    wait_for_nodes: WaitForNodes = False,
    dry_run: Annotated[
        bool,
        typer.Option(help="Check the spec, the model (fetched if needed) and every host, without starting anything."),
    ] = False,
) -> None:
    """Start a deployment, and return when it is ready.

    Checks every host first: GPUs, driver and NCCL, memory, disks, ports, limits, clocks, versions. On failure or
    Ctrl-C, everything that was started is removed.
    """
    from cluster.control.desired_state import Parts
    from cluster.launch import deployment
    from core.spec.loader import load_spec

    begin = time.monotonic()
    flags: dict[str, Any] = {
        "model.source": model,
        "name": name,
        "router.grpc_port": grpc_port,
        "router.http_port": http_port,
    }
    set_by_flags = [f"{path}={value}" for path, value in flags.items() if value is not None]
    spec = load_spec(topology, overrides=[*(overrides or []), *set_by_flags])
    if dry_run:
        with reporter(is_new=True) as report:
            deployment.check(spec, address=address or None, wait_for_nodes=wait_for_nodes, reporter=report)
        print(f"{spec.name}: every check passed, nothing was started")
        return
    try:
        with reporter(is_new=True) as report:
            state = deployment.deploy(
                spec,
                address=address or None,
                deadline=begin + (timeout or spec.timeouts.start_s),
                wait_for_nodes=wait_for_nodes,
                parts=Parts(),
                reporter=report,
            )
    except BrokenPipeError:
        # Other commands treat a closed pipe as the end of output.
        raise DeployError("output pipe closed; the deployment was removed") from None
    from cluster.launch.endpoints import openai_urls
    from cluster.launch.status import with_open_endpoints  # imports Ray

    endpoints = with_open_endpoints(state)
    seconds = time.monotonic() - begin
    print(f"{spec.name} is ready after {seconds:.0f} s: {spec.topology}, {spec.model.source} as {spec.model.name}")
    print(f"gRPC {endpoints.grpc} · OpenAI {openai_urls(endpoints.http)} · logs {states.log_dir(spec.name)}")
    if spec.security.tls == "off":
        print(TLS_IS_OFF)
    if state.endpoints:
        print(f"served at the endpoints of {state.endpoints} as model {spec.model.name}")
    elif state.needs_keys:
        print(
            f"clients need an API key: `cluster keys create NAME`; yours is in {states.operator_key_file(state.name)}"
        )


def down(
    name: Name = None,
    force: Annotated[bool, typer.Option(help="Remove its state even if its Ray cluster does not answer.")] = False,
) -> None:
    """Take a deployment down and remove everything it started. Requests in flight are cut off."""
    from cluster.launch import deployment

    begin = time.monotonic()
    try:
        state = find_state(name, to_remove=True)
    except NotDeployed as nothing:
        print(f"{str(nothing).partition(';')[0]}: nothing to take down")
        return
    if state.deploying is not None and state.deploying.is_running:
        _interrupt(state.deploying)
    other = deployment.take_down(state, force=force)
    if other:
        print(
            f"the {state.name} deployed from here has ended with its Ray; another one of that name, by "
            f"{other}, keeps running (`cluster --address {state.ray_address} down` takes it down)"
        )
        return
    with_ray = " and the Ray that was started for it" if state.local_ray else ""
    print(f"{state.name}{with_ray} is down after {time.monotonic() - begin:.1f} s")


def _interrupt(process: states.DeployProcess) -> None:
    """Make a running `cluster deploy` clean up and end, as on Ctrl-C."""
    os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + _INTERRUPT_S
    while process.is_running:
        if time.monotonic() > deadline:
            raise DeployError(f"`cluster deploy` (pid {process.pid}) did not end within {_INTERRUPT_S:g} s")
        time.sleep(0.1)
