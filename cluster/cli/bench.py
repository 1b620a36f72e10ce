"""`cluster bench`: a load on a live deployment."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.connection import find_state, join_controller
from cluster.cli.deploy import Name
from cluster.cli.endpoint_options import ApiKeyOption, access_to
from cluster.cli.planning.simulate import Scale, SloItl, SloTtft, Speedup, TraceFormat
from core.trace.trace import TraceRequest, read_trace
from core.trace.trace import poisson as make_poisson
from core.types.errors import SpecError

if TYPE_CHECKING:
    from cluster.launch.state import State
    from core.wire.client_access import EndpointAccess


def bench(
    trace: Annotated[Path | None, typer.Option("--trace", help="Requests to replay.")] = None,
    format: Annotated[TraceFormat | None, typer.Option(help="Default: by the file's name.")] = None,
    poisson: Annotated[
        float | None, typer.Option(min=0.001, help="Instead of a trace: so many requests a second.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of each request of --poisson.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer of --poisson.")] = 64,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Only so many; with --poisson 100 by default.")
    ] = None,
    speedup: Speedup = 1.0,
    scale_tokens: Scale = "1",
    http: Annotated[bool, typer.Option("--http", help="Through the OpenAI door instead of gRPC.")] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT (gRPC; grpcs:// with TLS) or http(s)://HOST:PORT of a router; default: the deployment's."
        ),
    ] = None,
    slo_ttft_ms: SloTtft = None,
    slo_itl_ms: SloItl = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Another one makes other prompts, of which nothing is cached.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    name: Name = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Replay a trace, or requests at random moments, against a deployment: latencies, goodput, reuse.

    Prompts are made from the trace's hash_ids: equal ids give equal tokens. Answers have exactly as many tokens as in
    the trace. --scale-tokens shortens both, so that a small model can take them. Beside each figure stands what the
    simulator predicts at the rates that the replicas have learnt. Exit code 1 when a request failed.
    """
    if (trace is None) == (poisson is None):
        raise SpecError("name either a --trace to replay, or a rate of requests with --poisson")
    if trace:
        asked = read_trace(
            trace, format=format and format.value, speedup=speedup, scale=scale_tokens, max_requests=requests
        )
    else:
        assert poisson is not None
        asked = make_poisson(
            rate=poisson, num_requests=requests or 100, num_tokens=prompt_tokens, num_output=output_tokens, seed=seed
        )
    state = None if endpoint else find_state(name)
    target = endpoint or (_endpoint(state, http=http) if state else "")
    access = access_to(state, api_key)
    slo = (slo_ttft_ms, slo_itl_ms)
    report = _measure(asked, target, access, seed=seed, timeout_s=timeout, slo=slo)
    report |= _predict(asked, state, slo=slo)
    print(json.dumps(report, indent=1) if as_json else _table(report))
    raise typer.Exit(1 if report["failed"] else 0)


def _endpoint(state: State, *, http: bool) -> str:
    return state.http if http else state.grpc


def _measure(
    asked: Sequence[TraceRequest],
    endpoint: str,
    access: EndpointAccess,
    *,
    seed: int,
    timeout_s: float,
    slo: tuple[float | None, float | None],
) -> dict[str, Any]:
    import asyncio

    from cluster.bench.endpoints import open_endpoint
    from cluster.bench.measured import summary
    from cluster.bench.replay import Answered, replay

    async def run() -> list[Answered]:
        with _progress(len(asked)) as advance:
            async with open_endpoint(endpoint, access) as target:
                return await replay(asked, target, seed=seed, timeout_s=timeout_s, on_end=lambda answered: advance())

    slo_ttft_s, slo_itl_s = (None if limit is None else limit / 1e3 for limit in slo)
    return summary(asyncio.run(run()), slo_ttft_s=slo_ttft_s, slo_itl_s=slo_itl_s)


def _predict(
    asked: Sequence[TraceRequest], state: State | None, *, slo: tuple[float | None, float | None]
) -> dict[str, Any]:
    """predicted: the simulator's report of the same load, at the rates that the replicas have learnt, this load
    included; None: there is none, and no_prediction says why."""
    if state is None:
        return {"predicted": None, "no_prediction": "by --endpoint nothing is known of replicas; name the deployment"}
    from core.types.errors import ClusterError

    try:
        controller = join_controller(state)
        from cluster.launch.driver import ask
        from core.spec.schema import Spec
        from core.trace.traffic import ReplicaReport
        from planner.autoscaler.live_prediction import predict_load

        spec = Spec.model_validate(ask(controller, "status")["spec"])
        replicas = [ReplicaReport.of(tree) for tree in ask(controller, "autoscaling")["replicas"]]
        slo_ttft_s, slo_itl_s = (None if limit is None else limit / 1e3 for limit in slo)
        return {"predicted": predict_load(spec, replicas, asked, slo_ttft_s=slo_ttft_s, slo_itl_s=slo_itl_s)}
    except ClusterError as error:
        return {"predicted": None, "no_prediction": " ".join(str(error).split())}


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, where that is a terminal; yields what is to be called whenever a request has ended."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    parts = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*parts, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)


def _table(report: dict[str, Any]) -> str:
    from cluster.cli.console import columns

    return "\n".join(
        [
            f"{report['completed']:,} requests in {report['duration_s']:,.1f} s, {report['failed']} failed",
            columns(_rows(report)),
            *([f"no prediction: {report['no_prediction']}"] if "no_prediction" in report else []),
            *(f"{count} x {error}" for error, count in report["errors"].items()),
        ]
    )


def _rows(report: dict[str, Any]) -> list[list[str]]:
    """Each figure, and what the simulator makes of the same load where it can."""
    sides = [report, *([report["predicted"]] if report["predicted"] else [])]
    rows = [["", "MEASURED", "PREDICTED"][: 1 + len(sides)]]
    for key, title in (("ttft_ms", "TTFT ms"), ("itl_ms", "ITL ms"), ("e2e_ms", "E2E ms")):
        for q in ("mean", "p50", "p90", "p99"):
            rows.append([f"{title} {q}", *(f"{side[key][q]:,.1f}" for side in sides)])
    for key, title, form in (
        ("output_tokens_per_s", "output tokens/s", ",.1f"),
        ("goodput_rps", "goodput, requests/s", ".2f"),
        ("good_share", "good, of all", ".1%"),
        ("reuse_share", "reused, of prompt tokens", ".2%"),
    ):
        rows.append([title, *(format(side[key], form) for side in sides)])
    return rows
