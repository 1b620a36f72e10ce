"""`python -m benchmarks router`: load test of one router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.options import DEFAULT_MODEL, Model
from core.types.errors import SpecError

# Share of the requested rate that must be reached.
_MOST_OF_IT = 0.9


def router(
    model: Model = DEFAULT_MODEL,
    streams: Annotated[str, typer.Option(metavar="N[,N…]", help="Concurrent streams; 0: none.")] = "1000,5000",
    rate: Annotated[float, typer.Option(min=1.0, help="Total tokens per second of the streams.")] = 10_000.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Duration of the stream measurement.")] = 10.0,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests for the cost measurement.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 64,
    at_once: Annotated[int, typer.Option(min=1, help="Concurrent requests.")] = 16,
    step_ms: Annotated[
        float, typer.Option(min=0.1, help="Step time of the replicas during the cost measurement.")
    ] = 20.0,
    prompt: Annotated[int, typer.Option(min=0, help="Length of a long prompt; 0: none.")] = 100_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the best counts.")] = 3,
    trace_ratio: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Also measure the cost of tracing this share of requests.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write cProfile data of one round over HTTP to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure one router's CPU cost over HTTP and gRPC: per request, per token, and for many streams.

    The load, the router, and replicas that speak the real protocol without computing run in three processes, which need
    a processor each. CPU time is comparable on a busy machine; token delays and the reached rate are not: a line
    reports a rate far below --rate.

    The delay of a token is the time since the previous one beyond a replica's step. The replica's own delay is reported
    separately.
    """
    from benchmarks.router.run import RouterLoad, bench_router
    from core.model.source import resolve

    load = RouterLoad(
        requests=requests,
        tokens=tokens,
        at_once=at_once,
        step_s=step_ms / 1e3,
        rounds=rounds,
        streams=_counts(streams),
        rate=rate,
        seconds=seconds,
        prompt=prompt,
        trace_ratio=trace_ratio,
    )
    result = bench_router(resolve(model), load, profile=profile)
    print(json.dumps(result) if as_json else "\n".join(lines(result, rate=rate)))


def _counts(streams: str) -> list[int]:
    parts = [part for part in streams.split(",") if part]
    if not all(part.isdecimal() for part in parts):
        raise SpecError(f"--streams {streams}: write integers, separated by commas")
    return [int(part) for part in parts if int(part)]


def lines(result: dict[str, Any], *, rate: float) -> Iterator[str]:
    """Format the result. rate: requested total tokens per second; a line reports if it was not reached."""
    for target, costs in result["costs"].items():
        yield (
            f"{target}: {costs['request_ms']:.2f} ms CPU per request, {costs['token_ms']:.4f} per token; one core "
            f"serves {costs['requests_per_core_s']} requests/s"
        )
    for row in result["prompts"]:
        yield f"{row['endpoint']}: a prompt of {row['tokens']} tokens takes {row['processor_ms']:.0f} ms CPU"
    for row in result.get("tracing", ()):
        took = row["request_ms"]
        yield (
            f"{row['endpoint']}: tracing {row['ratio']:.0%} of requests costs {row['costs']:.1%} more CPU time: best "
            f"{took['without']:.2f} ms per request without, {took['traced']:.2f} with"
        )
    for row in result["streams"]:
        beyond = row["beyond_pace_ms"]
        yield (
            f"{row['endpoint']}: {row['streams']} streams, {row['tokens_per_s']} tokens/s with "
            f"{row['processor_share']:.0%} of a core ({row['tokens_per_core_s']} would fill one), "
            f"{row['memory_kib_per_stream']:.0f} KiB per stream"
        )
        yield (
            f"    token delay beyond worker's pace: {beyond['p50']:.1f} ms median, {beyond['p99']:.1f} P99, "
            f"{beyond['max']:.1f} max; worker's delay {row['worker_late_ms']:.1f}"
        )
        if row["tokens_per_s"] < _MOST_OF_IT * rate:
            yield (
                f"    only {row['tokens_per_s']} of {rate:.0f} tokens/s arrived: machine or router too busy "
                "for the two lines above"
            )
