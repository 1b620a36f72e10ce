"""Compare the autoscaler with the best fixed split on many traffic shapes: `python -m benchmarks.autoscaler.matrix
--traces DIR`.

Each line of a set holds the options of one case of benchmarks/autoscaler/splits.py. The search for the best fixed split
tries every third number of prefill replicas from 2 on (every second, with eight replicas or fewer), then moves from the
best one to either side while that helps. See docs/benchmarks/planner.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.autoscaler.splits import make_fleets, make_trace, parse, run_fixed, run_scaled
from cluster.cli.console import columns
from core.trace.trace import TraceRequest
from planner.autoscaler.simulated_outlook import Fleets

_ALL = "--eviction lru --slo-ttft-ms 30000 --replicas 4 --period 600 --duration 600 --load 0.7"
SETS = {
    "known": {
        "turning": "",
        "turning, half the load": "--load 0.5",
        "turning, more load": "--load 0.9",
        "turning, slowly": "--period 1200 --duration 1200",
        "turning, quickly": "--period 300",
        "turning, 8 replicas": "--replicas 8",
        "turning, 8 replicas, half the load": "--replicas 8 --load 0.5",
        "turning, 16 replicas": "--replicas 16",
        "turning, other limits": "--slo-ttft-ms 10000 --slo-itl-ms 60",
        "steps": "--shape steps",
        "sine": "--shape sine",
        "tide": "--shape tide",
        "bursts": "--shape bursts",
        "spike": "--shape spike",
        "constant": "--shape constant",
        "constant, low": "--shape constant-low",
        "mooncake alone": "--only mooncake",
        "azure alone": "--only azure",
    },
    "held-out": {
        "turning": "--seed 101 --period 750 --duration 750 --load 0.6",
        "turning, 8 replicas": "--seed 102 --replicas 8 --period 900 --duration 900",
        "turning, more load": "--seed 103 --period 800 --duration 800 --load 0.8",
        "turning, other limits": "--seed 104 --slo-ttft-ms 15000 --slo-itl-ms 50 --load 0.75",
        "steps": "--seed 105 --shape steps --period 720 --duration 720 --load 0.6",
        "sine": "--seed 106 --shape sine --period 900 --duration 900",
        "tide": "--seed 107 --shape tide --period 840 --duration 840 --load 0.8",
        "bursts": "--seed 108 --shape bursts --period 480 --duration 720 --load 0.6",
        "spike": "--seed 109 --shape spike --period 400 --load 0.8",
        "constant": "--seed 110 --shape constant --load 0.8",
        "mooncake alone": "--seed 111 --only mooncake --load 0.6",
        "azure alone": "--seed 112 --only azure --load 0.8",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--set", choices=[*SETS], default="known")
    parser.add_argument("--cases", help="Only these cases: numbers from 0 on, separated by commas.")
    parser.add_argument(
        "--known-fixed", type=Path, help="Cache file for the best fixed splits, which are slow to find."
    )
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    cases = list(SETS[options.set].items())
    chosen = [cases[int(number)] for number in options.cases.split(",")] if options.cases else cases
    path: Path | None = options.known_fixed
    fixed = json.loads(path.read_text()) if path and path.exists() else {}
    rows = [["", "BEST FIXED", "GOOD", "AUTOSCALER", "RATIO", "CHANGES", "AN HOUR", "REPLICAS", "FAILED"]]
    for title, more in chosen:
        arguments = f"--traces {options.traces} {_ALL} {more}"
        case = parse(arguments.split() + (["-v"] if options.verbose else []))
        fleets = make_fleets(case)
        trace = make_trace(case, fleets)
        if more not in fixed:
            fixed[more] = _best_fixed(fleets, trace, case.replicas)
            if path:
                path.write_text(json.dumps(fixed))
        rows.append([title, *_row(fixed[more], run_scaled(case, fleets, trace), len(trace))])
        print(rows[-1], file=sys.stderr, flush=True)
    print(columns(rows))


def _best_fixed(fleets: Fleets, trace: list[TraceRequest], num_replicas: int) -> tuple[str, float]:
    tried: dict[int, float] = {}

    def good(num_prefill: int) -> float:
        if num_prefill not in tried:
            tried[num_prefill] = run_fixed(fleets, trace, num_replicas, num_prefill)["good_share"]
        return tried[num_prefill]

    step = 3 if num_replicas > 8 else 2
    best = max(range(2, num_replicas, step), key=good)
    for way in (-1, 1):
        while 1 <= best + way < num_replicas and good(best + way) > good(best):
            best += way
    return f"{best}P{num_replicas - best}D", good(best)


def _row(fixed: tuple[str, float], scaled: dict[str, Any], num_requests: int) -> list[str]:
    name, best = fixed
    good = scaled["good_share"]
    return [
        name,
        f"{best:.1%}",
        f"{good:.1%}",
        f"{good / best:.2f}" if best else "-",
        str(scaled["changes"]),
        f"{scaled['changes_per_hour']:.0f}",
        f"{scaled['mean_replicas']:.1f}",
        str(num_requests - scaled["completed"]),
    ]


if __name__ == "__main__":
    main()
