"""The autoscaler beside fixed splits of as many real replicas:

    python -m tests.benchmarks.autoscaler_live --traces DIR

One deployment of SmolLM2 has four replicas, of which each is given the same share of a processor (a control group of
the kernel, which needs root): otherwise whoever works would have what idle ones leave, and no split would be worse than
another. The deployment's own measured rates say how many requests of both kinds it carries (`cluster profile --live`),
and traffic whose shape turns is made of both public traces, as in tests/benchmarks/autoscaler.py, shortened for a small
model. The same trace is then sent at each fixed split, and once with the autoscaler, which begins at half of each;
other prompts each time, so that nothing is cached from the run before. See docs/benchmarks/autoscaler.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.cli.console import columns
from core.process.ports import free_port

_NAME = "autoscaler-live"
_PERIOD_US = 20_000  # of the kernel's account of a share: short beside a step
_QUEUE_S = 900  # a split that is wrong for half of the time must not lose what waits meanwhile
_WARM = (("azure_llm_2023_conv.csv", "0.5"), ("mooncake_conversation.jsonl", "0.1"))  # and so many times as fast
_CGROUPS = Path("/sys/fs/cgroup")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="Directory of the two traces.")
    parser.add_argument("--fixed", default="1P3D,2P2D,3P1D")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.25, help="Of a processor, for each replica.")
    parser.add_argument("--scale-tokens", default="1/16")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--period", type=float, default=480.0)
    parser.add_argument("--duration", type=float, default=480.0)
    parser.add_argument("--slo-ttft-ms", type=float, default=8_000.0)
    parser.add_argument("--slo-itl-ms", type=float, default=160.0)
    parser.add_argument("--interval", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, required=True, help="Directory for the trace and all figures.")
    options = parser.parse_args()
    directory: Path = options.output
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state:
        os.environ["CLUSTER_STATE_DIR"] = state
        half = options.replicas // 2
        begin = f"{half}P{options.replicas - half}D"
        with _deployed(begin), _shared(options.share):
            trace = _trace(options, directory)
            found: dict[str, Any] = {}
            for number, split in enumerate(options.fixed.split(",")):
                _scale(split)
                found[split] = _load(trace, options, seed=100 + number)
                (directory / "found.json").write_text(json.dumps(found, indent=1))
                _show(found)
            _scale(begin)
            _cluster("autoscale", "set", str(_rules(options, directory)), "--name", _NAME)
            found["autoscaler"] = _load(trace, options, seed=200)
            found["decisions"] = _cluster("autoscale", "status", "--name", _NAME)
    (directory / "found.json").write_text(json.dumps(found, indent=1))
    _show(found)
    print(found["decisions"])


@contextmanager
def _deployed(topology: str) -> Iterator[None]:
    ports = ["--grpc-port", str(free_port()), "--http-port", str(free_port())]
    _cluster("deploy", topology, "--name", _NAME, *ports, "--set", f"timeouts.queue_s={_QUEUE_S}")
    try:
        yield
    finally:
        _cluster("down", "--name", _NAME)


@contextmanager
def _shared(share: float) -> Iterator[None]:
    """Each replica has so much of a processor, whatever its role and whoever else is idle."""
    is_old = (_CGROUPS / "cpu" / "cpu.cfs_quota_us").exists()
    groups = []
    try:
        pools = json.loads(_cluster("status", "--json", "--name", _NAME))["pools"].values()
        for replica in (replica for pool in pools for replica in pool["replicas"]):
            group = (_CGROUPS / "cpu" if is_old else _CGROUPS) / f"{_NAME}-{replica['id']}"
            group.mkdir()
            groups.append(group)
            quota = int(share * _PERIOD_US)
            if is_old:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            for rank in replica["ranks"]:
                (group / "cgroup.procs").write_text(str(rank["pid"]))
        yield
    finally:
        for group in groups:
            for pid in (group / "cgroup.procs").read_text().split():
                (group.parent / "cgroup.procs").write_text(pid)
            group.rmdir()


def _trace(options: argparse.Namespace, directory: Path) -> Path:
    """As much as this deployment says that it carries, after it has been loaded for a while."""
    for number, (name, speedup) in enumerate(_WARM):
        warm = ["--trace", str(options.traces / name), "--scale-tokens", options.scale_tokens, "--speedup", speedup]
        _cluster("bench", *warm, "--requests", "25", "--seed", str(number), "--name", _NAME, "--json")
    profile, trace = directory / "live.json", directory / "trace.jsonl"
    _cluster("profile", "--live", "--name", _NAME, "-o", str(profile))
    shape = ["--period", str(options.period), "--duration", str(options.duration), "--load", str(options.load)]
    limits = ["--slo-ttft-ms", str(options.slo_ttft_ms), "--slo-itl-ms", str(options.slo_itl_ms)]
    same = ["--replicas", str(options.replicas), "--profile", str(profile), "--scale-tokens", options.scale_tokens]
    command = [sys.executable, "-m", "tests.benchmarks.autoscaler", "--traces", str(options.traces)]
    made = ["--seed", str(options.seed), "--write-trace", str(trace)]
    subprocess.run([*command, *shape, *limits, *same, *made], check=True)
    return trace


def _rules(options: argparse.Namespace, directory: Path) -> Path:
    pool = {"min": 1, "max": options.replicas - 1}
    rules = {
        "slo_ttft_ms": options.slo_ttft_ms,
        "slo_itl_ms": options.slo_itl_ms,
        "prefill": pool,
        "decode": pool,
        "max_devices": options.replicas,
        "interval_s": options.interval,
    }
    path = directory / "rules.yaml"
    path.write_text(json.dumps({"name": _NAME, "autoscale": rules}))  # which is YAML, too
    return path


def _scale(split: str) -> None:
    num_prefill, num_decode = split.rstrip("D").split("P")
    _cluster("scale", f"prefill={num_prefill}", f"decode={num_decode}", "--name", _NAME)


def _load(trace: Path, options: argparse.Namespace, *, seed: int) -> dict[str, Any]:
    limits = ["--slo-ttft-ms", str(options.slo_ttft_ms), "--slo-itl-ms", str(options.slo_itl_ms)]
    command = ["bench", "--trace", str(trace), "--seed", str(seed), *limits, "--name", _NAME, "--json"]
    report: dict[str, Any] = json.loads(_cluster(*command, check=False))
    return report


def _cluster(*arguments: str, check: bool = True) -> str:
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    return subprocess.run(command, check=check, stdout=subprocess.PIPE, text=True).stdout


def _show(found: dict[str, Any]) -> None:
    rows = [["", "GOOD", "GOOD/s", "TTFT P50 ms", "P99", "ITL P50 ms", "P99", "FAILED"]]
    for what, report in found.items():
        if isinstance(report, dict):
            ttft, itl = report["ttft_ms"], report["itl_ms"]
            times = [f"{ttft['p50']:,.0f}", f"{ttft['p99']:,.0f}", f"{itl['p50']:,.0f}", f"{itl['p99']:,.0f}"]
            good = [f"{report['good_share']:.1%}", f"{report['goodput_rps']:.3f}"]
            rows.append([what, *good, *times, str(report["failed"])])
    print(columns(rows), flush=True)
    for what, report in found.items():
        if isinstance(report, dict) and report["errors"]:
            print(what, report["errors"], flush=True)


if __name__ == "__main__":
    main()
