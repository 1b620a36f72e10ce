"""`python -m benchmarks router`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.planning.model_options import DEFAULT_MODEL, Model
from core.types.errors import SpecError

_MOST_OF_IT = 0.9  # of what was to come


def router(
    model: Model = DEFAULT_MODEL,
    streams: Annotated[str, typer.Option(metavar="N[,N…]", help="Answers at a time; 0: none.")] = "1000,5000",
    rate: Annotated[float, typer.Option(min=1.0, help="Tokens a second of all these.")] = 10_000.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="That they are looked at.")] = 10.0,
    requests: Annotated[int, typer.Option(min=1, help="Of which the costs are measured.")] = 64,
    tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 64,
    at_once: Annotated[int, typer.Option(min=1, help="Of these requests.")] = 16,
    step_ms: Annotated[float, typer.Option(min=0.1, help="Of the replicas' steps, while few ask.")] = 20.0,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of a long prompt; 0: none.")] = 100_000,
    rounds: Annotated[int, typer.Option(min=1, help="The best counts.")] = 3,
    trace_ratio: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="What it costs to trace so many of the requests; else not.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="A file for what cProfile sees of one round over HTTP.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """What one router carries over HTTP and gRPC, by the time of its processor: requests, tokens, many streams.

    Between a load and replicas that speak the real protocol and compute nothing, each in a process of its own: three
    processes, which want a processor each. The time of the router's processor says much the same on a busy machine; how
    late tokens are does not, nor what of --rate came: a line says so where much of it did not.

    A token is late by what lies between it and the one before, beyond a replica's step; what the replica itself was
    late with stands beside it, and is not the router's.
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
        raise SpecError(f"--streams {streams}: write whole numbers, with commas between them")
    return [int(part) for part in parts if int(part)]


def lines(result: dict[str, Any], *, rate: float) -> Iterator[str]:
    """rate: tokens a second that all streams were to get. What did not come tells of the machine, and is said."""
    for target, costs in result["costs"].items():
        yield (
            f"{target}: {costs['request_ms']:.2f} ms of processor a request, {costs['token_ms']:.4f} a token; one core "
            f"takes {costs['requests_per_core_s']} requests/s"
        )
    for row in result["prompts"]:
        yield f"{row['door']}: a prompt of {row['tokens']} tokens {row['processor_ms']:.0f} ms of processor"
    for row in result.get("tracing", ()):
        took = row["request_ms"]
        yield (
            f"{row['door']}: tracing {row['ratio']:.0%} of requests costs {row['costs']:.1%} of the processor: at best "
            f"{took['without']:.2f} ms a whole request without, {took['traced']:.2f} with"
        )
    for row in result["streams"]:
        beyond = row["beyond_pace_ms"]
        yield (
            f"{row['door']}: {row['streams']} streams, {row['tokens_per_s']} tokens/s with "
            f"{row['processor_share']:.0%} of a core ({row['tokens_per_core_s']} would fill one), "
            f"{row['memory_kib_per_stream']:.0f} KiB a stream"
        )
        yield (
            f"    a token later than its worker's pace: {beyond['p50']:.1f} ms at the median, {beyond['p99']:.1f} P99, "
            f"{beyond['max']:.1f} at most; the worker itself {row['worker_late_ms']:.1f}"
        )
        if row["tokens_per_s"] < _MOST_OF_IT * rate:
            yield (
                f"    only {row['tokens_per_s']} of {rate:.0f} tokens/s came: the machine, or the router, was too busy "
                "for what these two lines are about"
            )
