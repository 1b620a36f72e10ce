"""The simulator beside what it simulates: `python -m tests.benchmarks.simulator_reality --trace FILE`.

Measures this machine (`cluster profile`), then for each topology deploys it, replays a slice of the trace against it
(`cluster bench`), takes it down, and simulates the same slice on the profile (`cluster simulate`). Prints a table. Run
it while nothing else does. See docs/benchmarks/simulator.md.
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
from cluster.ports import free_port

_WARM_REQUESTS = 8  # links, memory and rates before the measurement
_METRICS = (("ttft_ms", "mean"), ("ttft_ms", "p50"), ("ttft_ms", "p90"), ("itl_ms", "mean"), ("itl_ms", "p50"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", required=True)
    parser.add_argument("--topologies", nargs="+", default=["1P1D", "2P2D"])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--speedup", type=float, default=0.12)
    parser.add_argument("--scale-tokens", default="1/32")
    parser.add_argument("--profile", help="A JSON file; default: measure one now.")
    parser.add_argument("--measured", help="Simulate beside an earlier run's measurements, of this JSON file.")
    parser.add_argument("-o", "--output", help="Write what was measured there, as JSON.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CLUSTER_STATE_DIR"] = directory
        profile = options.profile or _measure_profile(Path(directory))
        load = ["--trace", options.trace, "--scale-tokens", options.scale_tokens, "--speedup", str(options.speedup)]
        earlier = json.loads(Path(options.measured).read_text()) if options.measured else {}
        found = {
            topology: {
                "measured": earlier.get(topology, {}).get("measured") or _measure(topology, load, options.requests),
                "simulated": _simulate(topology, load, options.requests, profile),
            }
            for topology in options.topologies
        }
    if options.output:
        Path(options.output).write_text(json.dumps(found, indent=1))
    print(_table(found))


def _measure_profile(directory: Path) -> str:
    path = directory / "this-machine.json"
    print(_cluster("profile", "-o", str(path)), file=sys.stderr)
    print(path.read_text(), file=sys.stderr)
    return str(path)


def _measure(topology: str, load: list[str], num_requests: int) -> dict[str, Any]:
    name = f"reality-{topology.lower()}"
    ports = ["--grpc-port", str(free_port()), "--http-port", str(free_port())]
    try:
        _cluster("deploy", topology, "--name", name, *ports)
        _cluster("bench", *load, "--requests", str(_WARM_REQUESTS), "--seed", "1", "--name", name, "--json")
        report = _cluster("bench", *load, "--requests", str(num_requests), "--seed", "2", "--name", name, "--json")
    finally:
        _cluster("down", "--name", name)
    measured: dict[str, Any] = json.loads(report)
    return measured


def _simulate(topology: str, load: list[str], num_requests: int, profile: str) -> dict[str, Any]:
    same = ["--block-size", "16", "--eviction", "lru", "--max-requests", str(num_requests)]
    simulated: dict[str, Any] = json.loads(
        _cluster("simulate", *load, "--topology", topology, *same, "--profile", profile, "--json")
    )
    return simulated


def _cluster(*arguments: str) -> str:
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _table(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    rows = [["", "", "MEASURED", "SIMULATED", "DIFFERENCE"]]
    for topology, sides in found.items():
        measured, simulated = sides["measured"], sides["simulated"]
        for key, quantile in _METRICS:
            real, predicted = measured[key][quantile], simulated[key][quantile]
            title = f"{key.removesuffix('_ms').upper()} {quantile}"
            rows.append([topology, title, f"{real:.1f} ms", f"{predicted:.1f} ms", f"{predicted / real - 1:+.1%}"])
        shares = [f"{side['reuse_share']:.1%}" for side in (measured, simulated)]
        rows.append([topology, f"reused ({measured['completed']} of them)", *shares, ""])
    return columns(rows)


if __name__ == "__main__":
    main()
