"""Disaggregated and colocated roles, measured and predicted:

    python -m benchmarks.simulator.colocation --profile FILE

On the same cores: a prefill and a decode replica of one compute thread each, and one replica of two threads that does
both. For each: deploys it, replays a load through gRPC against it, takes it down; and lets the simulator serve the same
load on the profile (`cluster profile`). Prints a table, with the share of requests within each SLO. Run it while
nothing else does; see docs/benchmarks/planner.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile

from cluster.bench.endpoints import open_endpoint
from cluster.bench.replay import Answered, replay, summary
from cluster.cli.console import columns
from core.process.ports import free_port
from core.trace.trace import TraceRequest, poisson
from core.trace.traffic import Slo
from core.wire.client_access import EndpointAccess
from planner.simulator.profile import FleetSetup, Profile, load_profile
from planner.simulator.run import simulate

_SHAPES = {"1P1D": ("prefill", "decode"), "0P1D": ("decode",)}
_METRICS = (("ttft_ms", "p50"), ("ttft_ms", "p99"), ("itl_ms", "p50"), ("itl_ms", "p99"))
# Warm up links, memory and learned rates before the measurement.
_WARM_REQUESTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", required=True, help="Profile of this machine, with steps of two threads.")
    parser.add_argument("--rate", type=float, default=0.5, help="Requests per second.")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=512, help="Tokens per step of the colocated replica.")
    parser.add_argument("--slo", nargs="+", default=["1000x40"], metavar="TTFTxITL", help="SLOs in milliseconds.")
    options = parser.parse_args()
    trace = poisson(
        rate=options.rate,
        num_requests=options.requests,
        num_tokens=options.prompt_tokens,
        num_output=options.output_tokens,
        seed=2,
    )
    slos = [(float(ttft), float(itl)) for ttft, itl in (slo.split("x") for slo in options.slo)]
    rows = [["", *(" ".join(metric) for metric in _METRICS), *(f"within {slo}" for slo in options.slo)]]
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CLUSTER_STATE_DIR"] = directory
        for topology in _SHAPES:
            answers = _measure(topology, trace, options.chunk)
            measured = [summary(answers, Slo.of_ms(ttft, itl)) for ttft, itl in slos]
            trial = _trial(topology, trace, options.chunk, options.profile)
            predicted = [simulate(*trial, Slo.of_ms(ttft, itl)) for ttft, itl in slos]
            for name, found in (("measured", measured), ("predicted", predicted)):
                figures = [f"{found[0][key][q]:,.1f}" for key, q in _METRICS]
                rows.append([f"{topology} {name}", *figures, *(f"{one['good_share']:.1%}" for one in found)])
    print(columns(rows))


def _measure(topology: str, trace: list[TraceRequest], chunk: int) -> list[Answered]:
    name, port = f"colocation-{topology.lower()}", free_port()
    threads = 2 // len(_SHAPES[topology])
    sets = [f"{role}.resources.cpus={threads}" for role in _SHAPES[topology]] + [f"decode.max_batch_tokens={chunk}"]
    ports = ["--grpc-port", str(port), "--http-port", str(free_port())]
    try:
        _cluster("deploy", topology, "--name", name, *ports, *(word for one in sets for word in ("--set", one)))
        asyncio.run(_replay(port, trace[:_WARM_REQUESTS], seed=1))
        return asyncio.run(_replay(port, trace, seed=2))
    finally:
        _cluster("down", "--name", name)


async def _replay(port: int, trace: list[TraceRequest], *, seed: int) -> list[Answered]:
    async with open_endpoint(f"127.0.0.1:{port}", EndpointAccess()) as endpoint:
        return await replay(trace, endpoint, seed=seed, timeout_s=300.0)


def _trial(
    topology: str, trace: list[TraceRequest], chunk: int, profile: str
) -> tuple[FleetSetup, Profile, list[TraceRequest]]:
    known, num_prefill = load_profile(profile), len(_SHAPES[topology]) - 1
    setup = FleetSetup(
        num_prefill=num_prefill,
        num_decode=1,
        decode_width=2 - num_prefill,
        block_size=16,
        kv_tokens=known.kv.pool_tokens,
        prefix_fetches=True,
        prefill_batch_tokens=2048,
        decode_batch_tokens=chunk,
        max_running=64,
    )
    return setup, known, trace


def _cluster(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "cluster.cli", *arguments], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
