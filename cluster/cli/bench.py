"""`cluster bench`: load test of a running deployment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.connection import learned_by, open_access
from cluster.cli.console import columns, progress_bar
from cluster.cli.options import ApiKeyOption, AsJson, Name, Scale, SloItl, SloTtft, Speedup
from core.trace.trace import TraceRequest, read_trace
from core.trace.trace import poisson as make_poisson
from core.trace.traffic import Slo
from core.types.errors import ClusterError, SpecError

if TYPE_CHECKING:
    from cluster.launch.state import State
    from core.wire.client_access import EndpointAccess


def bench(
    trace: Annotated[Path | None, typer.Option("--trace", help="Requests to replay.")] = None,
    poisson: Annotated[
        float | None, typer.Option(min=0.001, help="Instead of a trace: requests per second at random times.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt length, with --poisson.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Answer length, with --poisson.")] = 64,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Maximum number of requests; default with --poisson: 100.")
    ] = None,
    speedup: Speedup = 1.0,
    scale_tokens: Scale = "1",
    http: Annotated[bool, typer.Option("--http", help="Use the OpenAI API instead of gRPC.")] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT (gRPC; grpcs:// with TLS) or http(s)://HOST:PORT of a router; default: the deployment's."
        ),
    ] = None,
    slo_ttft_ms: SloTtft = None,
    slo_itl_ms: SloItl = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts; a new seed avoids cached prefixes.")] = 0,
    as_json: AsJson = False,
    name: Name = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Replay a trace or random requests against a deployment: latencies, goodput, prefix reuse.

    Prompts are generated from the trace's hash_ids: equal ids give equal tokens. Answers have exactly the lengths in
    the trace. --scale-tokens shortens both for small models. Each figure is shown next to the simulator's prediction at
    the replicas' learned rates. Exit code 1 if a request failed.
    """
    if (trace is None) == (poisson is None):
        raise SpecError("give either --trace or --poisson")
    if trace:
        load = read_trace(trace, speedup=speedup, scale=scale_tokens, max_requests=requests)
    else:
        assert poisson is not None
        load = make_poisson(
            rate=poisson, num_requests=requests or 100, num_tokens=prompt_tokens, num_output=output_tokens, seed=seed
        )
    state, access = open_access(name, endpoint, api_key)
    own = (state.http if http else state.grpc) if state else ""
    slo = Slo.of_ms(slo_ttft_ms, slo_itl_ms)
    report = _measure(load, endpoint or own, access, seed=seed, timeout_s=timeout, slo=slo)
    report |= _predict(load, state, slo=slo)
    print(json.dumps(report, indent=1) if as_json else _table(report))
    raise typer.Exit(1 if report["failed"] else 0)


def _measure(
    load: Sequence[TraceRequest], endpoint: str, access: EndpointAccess, *, seed: int, timeout_s: float, slo: Slo
) -> dict[str, Any]:
    from cluster.bench.endpoints import open_endpoint
    from cluster.bench.replay import Answered, replay, summary

    async def run() -> list[Answered]:
        with progress_bar("requests", is_transient=True) as progress:
            task = progress.add_task("", total=len(load))
            async with open_endpoint(endpoint, access) as target:
                return await replay(
                    load, target, seed=seed, timeout_s=timeout_s, on_end=lambda answered: progress.advance(task)
                )

    return summary(asyncio.run(run()), slo)


def _predict(load: Sequence[TraceRequest], state: State | None, *, slo: Slo) -> dict[str, Any]:
    """Return the simulator's report of the same load at the replicas' learned rates, as `predicted`.

    If there is none, `predicted` is None and `no_prediction` gives the reason. The rates include this load.
    """
    if state is None:
        return {"predicted": None, "no_prediction": "--endpoint gives no data about replicas; use --name"}
    try:
        spec, replicas = learned_by(state)
        from planner.autoscaler.live import predict_load

        return {"predicted": predict_load(spec, replicas, load, slo)}
    except ClusterError as error:
        return {"predicted": None, "no_prediction": " ".join(str(error).split())}


def _table(report: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"{report['completed']:,} requests in {report['duration_s']:,.1f} s, {report['failed']} failed",
            columns(_rows(report)),
            *([f"no prediction: {report['no_prediction']}"] if "no_prediction" in report else []),
            *(f"{count} x {error}" for error, count in report["errors"].items()),
        ]
    )


def _rows(report: dict[str, Any]) -> list[list[str]]:
    """Return table rows: each measured figure, and the predicted one if there is one."""
    sides = [report, *([report["predicted"]] if report["predicted"] else [])]
    rows = [["", "MEASURED", "PREDICTED"][: 1 + len(sides)]]
    for key, title in (("ttft_ms", "TTFT ms"), ("itl_ms", "ITL ms"), ("e2e_ms", "E2E ms")):
        for q in ("mean", "p50", "p90", "p99"):
            rows.append([f"{title} {q}", *(f"{side[key][q]:,.1f}" for side in sides)])
    for key, title, form in (
        ("output_tokens_per_s", "output tokens/s", ",.1f"),
        ("goodput_rps", "goodput, requests/s", ".2f"),
        ("good_share", "good, share of all", ".1%"),
        ("reuse_share", "reused prompt tokens", ".2%"),
    ):
        rows.append([title, *(format(side[key], form) for side in sides)])
    return rows
