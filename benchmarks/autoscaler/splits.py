"""Compare the autoscaler with every fixed split of the same replicas on changing traffic: `python -m
benchmarks.autoscaler.splits --traces DIR`.

benchmarks/autoscaler/mix.py mixes two kinds of requests from both public traces: with at least twenty prompt tokens per
answer token, and with at most two. `--shape` sets how the mix changes. `--load` is a share of what 16 replicas carry by
arithmetic (planner/autoscaler/simulated_outlook.py) if they are split optimally at each moment. See
docs/benchmarks/planner.md.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.autoscaler import mix as mixes
from benchmarks.autoscaler.mix import MixRates, Wave
from cluster.cli.planning.autoscale import compare_table
from core.spec.schema import AutoscaleSpec, PoolBounds
from core.trace.trace import TraceRequest, read_trace, write_trace
from core.trace.traffic import Slo
from planner.autoscaler.decide import Autoscaler
from planner.autoscaler.pool_sizes import PoolSizes
from planner.autoscaler.replay import ScaledReplay
from planner.autoscaler.scaling_decision import ScalingDecision
from planner.autoscaler.simulated_outlook import Fleets, demand_of
from planner.simulator.profile import FleetSetup, load_profile

_FILES = {"mooncake": "mooncake_conversation.jsonl", "azure": "azure_llm_2023_conv.csv"}
_PROFILE = "a100x8-llama-3.1-405b"
# Assumed prefix reuse for the load arithmetic.
_REUSE = 0.2


def main() -> None:
    options = parse(None)
    fleets = make_fleets(options)
    trace = make_trace(options, fleets)
    if options.write_trace:
        write_trace(trace, options.write_trace)
        return
    scaled = run_scaled(options, fleets, trace)
    splits = _splits(options)
    with ProcessPoolExecutor(options.processes) as pool:
        fixed = list(pool.map(partial(run_fixed, fleets, trace, options.replicas), splits))
    names = [f"{num_prefill}P{options.replicas - num_prefill}D" for num_prefill in splits]
    print(compare_table({"scaled": scaled, "fixed": dict(zip(names, fixed, strict=True))}))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the options; None: those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="Directory with the two traces.")
    parser.add_argument(
        "--only", choices=[*_FILES], help="Use only this trace of --traces, in its order, at the rate of --load."
    )
    parser.add_argument("--shape", choices=[*_SHAPES], default="turning")
    parser.add_argument("--period", type=float, default=1200.0)
    parser.add_argument("--duration", type=float, default=2400.0)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument(
        "--eviction", default="reuse_value", help="Eviction policy of all replicas; lru simulates three times as fast."
    )
    parser.add_argument("--slo-ttft-ms", type=float, default=20_000.0)
    parser.add_argument("--slo-itl-ms", type=float, default=45.0)
    parser.add_argument("--begin", help="Initial sizes, such as 8P8D; default: equal.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--fixed", help="Only these fixed splits: numbers of prefill replicas, separated by commas, or 'none'."
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write-trace", type=Path, help="Write the mixed trace to this file and exit.")
    parser.add_argument("-v", "--verbose", action="store_true")
    return parser.parse_args(arguments)


def make_fleets(options: argparse.Namespace) -> Fleets:
    profile = load_profile(_PROFILE)
    setup = FleetSetup(
        num_prefill=1,
        num_decode=1,
        block_size=64,
        kv_tokens=profile.kv.pool_tokens,
        prefix_fetches=True,
        eviction=options.eviction,
        waits_in_router=True,
    )
    return Fleets(setup=setup, profile=profile, slo=Slo.of_ms(options.slo_ttft_ms, options.slo_itl_ms))


def make_trace(options: argparse.Namespace, fleets: Fleets) -> list[TraceRequest]:
    names = [_FILES[options.only]] if options.only else [*_FILES.values()]
    traces = [read_trace(options.traces / name) for name in names]
    if options.only:
        return _window_of(traces[0], options, fleets)
    wave, swell = _SHAPES[options.shape](options.period)

    def full_rate(share: float) -> float:
        """Return the request rate of one kind that saturates all replicas, if split optimally."""
        one = mixes.mix(
            traces,
            rates=MixRates(prompt_heavy=1.0, answer_heavy=1.0),
            wave=mixes.constant(share),
            swell=mixes.constant(1.0),
            duration_s=2000.0,
            seed=0,
        )
        return float(options.replicas / _replicas_for(one, fleets))

    rates = MixRates(prompt_heavy=options.load * full_rate(0.0), answer_heavy=options.load * full_rate(1.0))
    trace = mixes.mix(traces, rates=rates, wave=wave, swell=swell, duration_s=options.duration, seed=options.seed)
    print(f"{len(trace):,} requests; {rates}", file=sys.stderr)
    return trace


def _window_of(trace: list[TraceRequest], options: argparse.Namespace, fleets: Fleets) -> list[TraceRequest]:
    """Cut a window of the trace, at a position drawn from the seed."""
    speedup = options.load * options.replicas / _replicas_for(trace, fleets)
    begin_s = random.Random(options.seed).uniform(0.0, trace[-1].arrival_s - options.duration * speedup)
    end_s = begin_s + options.duration * speedup
    found = [request for request in trace if begin_s <= request.arrival_s < end_s]
    return [
        replace(request, number=number, arrival_s=(request.arrival_s - found[0].arrival_s) / speedup)
        for number, request in enumerate(found)
    ]


def _replicas_for(trace: list[TraceRequest], fleets: Fleets) -> float:
    return sum(demand_of(trace, fleets, reuse_share=_REUSE))


_SHAPES: dict[str, Callable[[float], tuple[Wave, Wave]]] = {
    "turning": lambda period_s: (mixes.turning(period_s), mixes.constant(1.0)),
    "steps": lambda period_s: (mixes.steps([0.0, 1.0, 0.4], each_s=period_s / 3), mixes.constant(1.0)),
    # Suddenly answer-heavy for a quarter of each period.
    "bursts": lambda period_s: (mixes.steps([0.0, 0.0, 0.0, 1.0], each_s=period_s / 4), mixes.constant(1.0)),
    "sine": lambda period_s: (mixes.slow_sine(period_s), mixes.constant(1.0)),
    "constant": lambda period_s: (mixes.constant(0.5), mixes.constant(1.0)),
    "constant-low": lambda period_s: (mixes.constant(0.5), mixes.constant(0.4)),
    "spike": lambda period_s: (
        mixes.constant(0.5),
        mixes.spike(0.4, 1.0, begin_s=period_s / 2, end_s=period_s / 2 + 120),
    ),
    "tide": lambda period_s: (mixes.slow_sine(period_s * 0.7), lambda t: 0.3 + 0.7 * mixes.slow_sine(period_s)(t)),
}


def _splits(options: argparse.Namespace) -> list[int]:
    if options.fixed == "none":
        return []
    if options.fixed:
        return [int(number) for number in options.fixed.split(",")]
    return list(range(1, options.replicas))


def run_scaled(options: argparse.Namespace, fleets: Fleets, trace: list[TraceRequest]) -> dict[str, Any]:
    most = options.replicas - 1
    spec = AutoscaleSpec(
        slo_ttft_ms=options.slo_ttft_ms,
        slo_itl_ms=options.slo_itl_ms,
        prefill=PoolBounds(min=1, max=most),
        decode=PoolBounds(min=1, max=most),
        max_devices=options.replicas,
    )
    autoscaler = Autoscaler(spec, devices=PoolSizes(1, 1))
    half = options.replicas // 2
    begin = PoolSizes(*map(int, options.begin.rstrip("D").split("P"))) if options.begin else PoolSizes(half, half)
    run = ScaledReplay(
        fleets,
        trace,
        autoscaler,
        begin=begin,
        decided=lambda d: options.verbose and print(_line(d), file=sys.stderr, flush=True),
    )
    return run.run()


def _line(d: ScalingDecision) -> str:
    good = f"{d.measured['good_share']:6.1%}" if d.measured else "     -"
    change = f"{d.time_s:6.0f} s {good} {d.before} -> {d.after} {d.mode}: {d.reason}"
    return f"{change} [{d.load}] {d.took_s:.1f} s, {len(d.tried)} tried"


def run_fixed(fleets: Fleets, trace: list[TraceRequest], num_replicas: int, num_prefill: int) -> dict[str, Any]:
    return fleets.simulate(PoolSizes(num_prefill, num_replicas - num_prefill), trace)


if __name__ == "__main__":
    main()
