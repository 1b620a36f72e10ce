"""Compare the simulator with real deployments: `python -m benchmarks.simulator.reality --trace FILE`.

For each topology: measures this machine (`cluster profile`), deploys the topology, replays a slice of the trace against
it (`cluster bench`), reads the rates that it has learned (`cluster profile --live`), takes it down, and simulates the
same slice on both profiles. Prints a table, with the share of time that the hypervisor took from this machine. Run it
while nothing else does; see docs/benchmarks/planner.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster.cli.console import columns
from core.process.ports import free_port

# Warm up links, memory and learned rates before the measurement.
_WARM_REQUESTS = 4
_METRICS = (("ttft_ms", "mean"), ("ttft_ms", "p50"), ("ttft_ms", "p90"), ("itl_ms", "mean"), ("itl_ms", "p50"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", required=True)
    parser.add_argument("--topologies", nargs="+", default=["1P1D", "2P2D"])
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--speedup", type=float, default=0.2)
    parser.add_argument("--scale-tokens", default="1/4")
    parser.add_argument(
        "--profile", type=Path, help="Profile of this machine; default: measure one before each topology."
    )
    parser.add_argument("-o", "--output", help="Write the results to this file, as JSON.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CLUSTER_STATE_DIR"] = directory
        load = ["--trace", options.trace, "--scale-tokens", options.scale_tokens, "--speedup", str(options.speedup)]
        found = {}
        for topology in options.topologies:
            before = options.profile or Path(directory) / f"{topology}.json"
            live = Path(directory) / f"{topology}-live.json"
            begin = _stolen()
            if not options.profile:
                _cluster("profile", "-o", str(before))
            between = _stolen()
            measured = _measure(topology, load, options.requests, live)
            found[topology] = {
                "profile": json.loads(before.read_text()),
                "live_profile": json.loads(live.read_text()),
                "measured": measured,
                "simulated": _simulate(topology, load, options.requests, before),
                "simulated_live": _simulate(topology, load, options.requests, live),
                "stolen": {"profile": _share(begin, between), "bench": _share(between, _stolen())},
            }
            if options.output:
                Path(options.output).write_text(json.dumps(found, indent=1))
    print(_table(found))


def _stolen() -> tuple[float, float]:
    """Return CPU time so far: total, and time stolen by the hypervisor."""
    times = [float(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(times), times[7]


def _share(begin: tuple[float, float], end: tuple[float, float]) -> float:
    return (end[1] - begin[1]) / max(1.0, end[0] - begin[0])


def _measure(topology: str, load: list[str], num_requests: int, live_profile: Path) -> dict[str, Any]:
    name = f"reality-{topology.lower()}"
    ports = ["--grpc-port", str(free_port()), "--http-port", str(free_port())]
    try:
        _cluster("deploy", topology, "--name", name, *ports)
        warm = ["--requests", str(_WARM_REQUESTS), "--speedup", "1", "--seed", "1"]
        _cluster("bench", *load, *warm, "--name", name, "--json")
        report = _cluster("bench", *load, "--requests", str(num_requests), "--seed", "2", "--name", name, "--json")
        _cluster("profile", "--live", "--name", name, "-o", str(live_profile))
    finally:
        _cluster("down", "--name", name)
    measured: dict[str, Any] = json.loads(report)
    return measured


def _simulate(topology: str, load: list[str], num_requests: int, profile: Path) -> dict[str, Any]:
    same = ["--block-size", "16", "--max-requests", str(num_requests)]
    simulated: dict[str, Any] = json.loads(
        _cluster("simulate", *load, "--topology", topology, *same, "--profile", str(profile), "--json")
    )
    return simulated


def _cluster(*arguments: str) -> str:
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = [["", "", "MEASURED", "SIMULATED", "", "BY LIVE RATES", ""]]
    for topology, sides in found.items():
        measured, simulations = sides["measured"], (sides["simulated"], sides["simulated_live"])
        for key, quantile in _METRICS:
            real = measured[key][quantile]
            cells = [f"{real:.1f} ms"]
            for simulated in simulations:
                predicted = simulated[key][quantile]
                cells += [f"{predicted:.1f} ms", f"{predicted / real - 1:+.1%}"]
            rows.append([topology, f"{key.removesuffix('_ms').upper()} {quantile}", *cells])
        reused = [f"{side['reuse_share']:.1%}" for side in (measured, *simulations)]
        rows.append([topology, f"reused ({measured['completed']} of them)", reused[0], reused[1], "", reused[2], ""])
        taken = sides["stolen"]
        rows.append([topology, "time stolen", f"{taken['bench']:.1%}", f"{taken['profile']:.1%}", "", "", ""])
    return columns(rows)


if __name__ == "__main__":
    main()
