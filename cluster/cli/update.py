"""`cluster update`: rolling update to another spec."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.connection import ask, find_state, join_controller
from cluster.cli.console import columns, reporter
from cluster.cli.options import Name, WaitForNodes
from core.types.errors import DeployError, SpecError

if TYPE_CHECKING:
    from cluster.control.replica import ControllerReport, Reporter
    from cluster.rollout.spec_diff import SpecChange
    from core.spec.schema import Spec

_POLL_S = 0.5


def update(
    topology: Annotated[
        str | None, typer.Argument(metavar="FILE|2P4D", help="New spec; default: only the changes of --set.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field of the spec, e.g. kv.pool_dtype=int8."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print what would be replaced and why, and check the model, without changing anything.")
    ] = False,
    canary: Annotated[
        float | None, typer.Option(help="Share of requests for the new revision at first, e.g. 0.1.")
    ] = None,
    canary_s: Annotated[float, typer.Option(min=0, help="Duration of the canary phase in seconds.")] = 60.0,
    max_error_increase: Annotated[
        float, typer.Option(min=0, help="Roll back if the error rate grows by more than this.")
    ] = 0.1,
    max_latency_factor: Annotated[
        float | None,
        typer.Option(
            help="Roll back if mean TTFT or ITL exceeds the old revision's by this factor. Default: not compared."
        ),
    ] = None,
    restart: Annotated[bool, typer.Option(help="Restart replicas even if their spec is unchanged.")] = False,
    abort: Annotated[bool, typer.Option(help="Roll back the running update.")] = False,
    wait_for_nodes: WaitForNodes = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds to watch; default: until the update ends.")] = None,
    name: Name = None,
) -> None:
    """Update a running deployment to another spec, replica by replica, while requests run. Returns when it is done.

    The update continues without this command. It rolls back by itself if new replicas do not start, fail more requests
    than the old ones, or are slower. Exit code 2: the update was rolled back.
    """
    if not (topology or overrides or restart or abort):
        raise SpecError("cluster update: give a spec, --set PATH=VALUE, --restart or --abort")
    begin = time.monotonic()
    state = find_state(name)
    controller = join_controller(state)
    deadline = None if timeout is None else begin + timeout
    if abort:
        revision = ask(controller, "abort_update")
        with reporter(is_new=False) as report:
            _await_end(controller, report, deadline=deadline)
        print(f"back at revision {revision} after {time.monotonic() - begin:.1f} s")
        return
    from cluster.launch.preflight import check_model
    from cluster.launch.status import await_serving
    from cluster.rollout.spec_diff import changes_of, check_possible
    from cluster.rollout.update import UpdateOptions
    from core.spec.loader import parse_spec
    from core.spec.schema import is_fetched

    now: ControllerReport = ask(controller, "status")
    old = parse_spec(now["spec"], origin="the current spec")
    new = _requested_spec(old, topology, overrides or [])
    changes = changes_of(old, new)
    options = UpdateOptions(
        canary=canary,
        canary_s=canary_s,
        max_error_increase=max_error_increase,
        max_latency_factor=max_latency_factor,
        restarts_all=restart,
        waits_for_nodes=wait_for_nodes,
    )
    if dry_run:
        print(_as_text(changes, now, restarts_all=restart))
        # A new source would have to be fetched.
        if changes and not any(map(is_fetched, _sources(new) - _sources(old))):
            check_model(new, lambda text: None)
        return
    if not changes and not restart:
        print("nothing changes")
        return
    check_possible(changes)
    with reporter(is_new=False) as report:
        check_model(new, report.say)
        if ask(controller, "update", new.model_dump(mode="json"), options, seen=now["spec"]):
            message = _await_end(controller, report, deadline=deadline)
        else:
            end_at = deadline or begin + new.timeouts.start_s
            await_serving(controller, state, ("prefill", "decode"), deadline=end_at, reporter=report)
            message = "applied live: no replica was replaced"
    print(f"{message}, after {time.monotonic() - begin:.1f} s")


def _requested_spec(old: Spec, topology: str | None, overrides: list[str]) -> Spec:
    """Return the requested spec. Raises SpecError."""
    from cluster.rollout.spec_diff import updated
    from core.spec.loader import named_keys

    named = named_keys(topology, overrides)
    given = named.pop("name", None)
    if given not in (None, old.name):
        raise SpecError(f"name: the spec is named {given}, the deployment {old.name}; a name cannot change")
    return updated(old, named, is_whole=topology is not None and Path(topology).exists())


def _sources(spec: Spec) -> set[str]:
    return {spec.model.source, *([spec.speculation.model] if spec.speculation.model else [])}


def _as_text(changes: Sequence[SpecChange], now: ControllerReport, *, restarts_all: bool) -> str:
    """Format the effect of an update as text."""
    from cluster.rollout.spec_diff import Needs
    from cluster.rollout.updater import roles_of

    lines = [columns([["CHANGE", "NEEDS"], *([str(one), str(one.needs)] for one in changes)])] if changes else []
    if any(one.needs is Needs.DEPLOYMENT for one in changes):
        return "\n".join([*lines, "an update cannot do this: deploy the new spec under another --name"])
    replaced = roles_of(changes, restarts_all=restarts_all)
    sizes = {one.path.removesuffix(".replicas"): one.new for one in changes if one.path.endswith(".replicas")}
    for role, pool in now["pools"].items():
        ids = ", ".join(replica["id"] for replica in pool["replicas"]) or "none"
        fate = "replaced" if role in replaced else "kept"
        resized = f"; the pool is scaled from {len(pool['replicas'])} to {sizes[role]}" if role in sizes else ""
        lines.append(f"{role}: {ids} {fate}{resized}")
    if not changes and not restarts_all:
        lines = ["nothing changes"]
    return "\n".join(lines)


def _await_end(controller: Any, report: Reporter, *, deadline: float | None) -> str:
    """Wait until the update ends. Returns its outcome. Raises DeployError if it was rolled back, or at the deadline."""
    message, was_returning = "", False
    while True:
        now: ControllerReport = ask(controller, "status")
        report.show(now["pools"])
        revision = now["revision"]
        if (update := revision["update"]) is None:
            break
        is_returning = update["phase"] == "returning"
        if is_returning and not was_returning:
            report.say(f"rolling back revision {update['revision']}: {update['reason']}")
        was_returning = is_returning
        step = f"{update['phase']}: {update['step']}; {update['share']:.0%} of the requests"
        if step != message:
            report.say(step)
        message = step
        if deadline is not None and time.monotonic() > deadline:
            raise DeployError(
                f"not done in time, the update continues ({step}); `cluster update --abort` rolls it back"
            )
        time.sleep(_POLL_S)
    outcome = revision["last_update"]
    if "rolled back" in outcome and "an operator" not in outcome:
        raise DeployError(outcome)
    return outcome
