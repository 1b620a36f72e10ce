"""`python -m benchmarks chaos`: check that clients do not notice killed processes."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from benchmarks.chaos.tally import Mismatch, Tally
from cluster.cli.connection import access_to, find_state, join_controller
from cluster.cli.options import ApiKeyOption, Name
from core.types.errors import SpecError

# With a single router, clients have to retry, so --all leaves it out.
_SINGLE_ROUTER = "router"


def chaos(
    faults: Annotated[
        str | None, typer.Option(metavar="NAME,NAME,…", help="Faults to inject; `list` shows them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All faults except the router's, in turn.")] = False,
    minutes: Annotated[float, typer.Option(min=0.05, help="Duration in minutes.")] = 2.0,
    rate: Annotated[float, typer.Option(min=0.01, help="Requests per second.")] = 1.0,
    streams: Annotated[int, typer.Option(min=0, help="Number of concurrent requests, instead of a rate.")] = 0,
    rest: Annotated[float, typer.Option(min=0.0, help="Seconds between a recovery and the next fault.")] = 3.0,
    questions: Annotated[int, typer.Option(min=1, help="Number of different requests.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=2, help="Length of each answer.")] = 48,
    seed: Annotated[int, typer.Option(help="Seed of the request order and of the choice of targets.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    name: Name = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Send requests to a deployment while its processes are killed and stopped, and compare every answer.

    Answers are compared with those given before the first fault. Works for deployments whose Ray was started by
    `cluster deploy` on this machine. Exit code: 0 if nothing failed, differed or leaked, else 1.
    """
    chosen = _choose(faults, everything)
    if chosen is None:
        return
    state = find_state(name)
    controller = join_controller(state)
    import asyncio

    from benchmarks.chaos.run import Experiment, run
    from benchmarks.chaos.site import Site

    experiment = Experiment(
        faults=chosen,
        seconds=minutes * 60,
        rate=rate,
        streams=streams,
        rest_s=rest,
        num_questions=questions,
        max_tokens=max_tokens,
        seed=seed,
    )
    access = access_to(state, api_key)
    tally = asyncio.run(run(experiment, Site(state, controller), state.grpc, access, say=_say))
    print(json.dumps(tally.as_dict(), indent=1) if as_json else _as_text(tally))
    raise typer.Exit(0 if tally.is_clean else 1)


def _choose(faults: str | None, everything: bool) -> list[str] | None:
    """Return the chosen faults; None after printing the list. Raises SpecError."""
    from benchmarks.chaos.faults import FAULTS, PARTITIONS

    if faults == "list":
        from cluster.cli.console import columns

        print(columns([[name, fault.explanation] for name, fault in FAULTS.items()]))
        return None
    from benchmarks.chaos.network import check_may_partition

    if everything:
        left_out = {_SINGLE_ROUTER}
        try:
            check_may_partition()
        except SpecError as error:
            _say(f"without {', '.join(PARTITIONS)}: {error}")
            left_out |= PARTITIONS
        return [name for name in FAULTS if name not in left_out]
    chosen = [name for name in (faults or "").split(",") if name]
    if unknown := [name for name in chosen if name not in FAULTS]:
        raise SpecError(f"fault {unknown[0]} not found; available: {', '.join(FAULTS)}")
    if PARTITIONS.intersection(chosen):
        check_may_partition()
    return chosen


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _as_text(tally: Tally) -> str:
    from cluster.cli.console import columns

    account = tally.as_dict()
    counts = "sent completed failed refused aborted asked_again retried migrated mismatched".split()
    rows = [["FAULT", "STRUCK", "AT", "WHOLE AFTER", "WORST PAUSE"]]
    for stroke in tally.strokes:
        recovered = f"{stroke.recovered_s:.1f} s" if stroke.recovered_s is not None else "not seen"
        rows.append([stroke.fault, stroke.target, f"{stroke.at_s:.0f} s", recovered, f"{stroke.worst_pause_s:.2f} s"])
    growth = max(tally.memory_growth_mib.items(), key=lambda item: item[1], default=("none", 0.0))
    return "\n".join(
        [
            columns(rows),
            " · ".join(f"{name.replace('_', ' ')} {account[name]}" for name in counts),
            f"worst pause {tally.worst_pause_s:.2f} s · blocks leaked {sum(tally.blocks_leaked.values())}"
            f" · most memory gained: {growth[0]} {growth[1]:+.1f} MiB",
            *tally.failures,
            *map(_describe, tally.mismatches),
        ]
    )


def _describe(mismatch: Mismatch) -> str:
    kind = "greedy" if mismatch.was_greedy else "sampled"
    return (
        f"question {mismatch.question} ({kind}) differs from token {mismatch.position} on; "
        f"log-probability gap of the top two tokens there: {mismatch.gap:.3f}"
    )
