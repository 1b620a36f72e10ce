"""Sampler relative to torch's operations, and async scheduling relative to waiting steps.

python -m tests.gpu_check.loop SHAPE
"""

from __future__ import annotations

import sys

import torch

from benchmarks.engine.loop import bench_sampler, bench_steps, num_blocks_of_steps
from benchmarks.engine.random_models import random_runner
from tests.gpu_check.rows import tell


def main() -> None:
    for row in bench_sampler(torch.device("cuda")):
        name = f"sampler {row['rows']} x {row['vocabulary']}, {row['asks']}, {row['logits']} logits"
        tell(name, row["kernel"], f"us; by torch's operations {row['torch']:.0f}")
    with torch.inference_mode():
        runner = random_runner(sys.argv[1], num_blocks=num_blocks_of_steps(), recorded_rows=64)
        for row in bench_steps(runner):
            name = f"{row['rows']} x {row['context']}, {row['asks']}"
            tell(f"{name}: a step that runs ahead", row["ahead_ms"], "ms")
            tell(f"{name}: one that waits", row["waits_ms"], "ms")
            tell(f"{name}: beyond the device's own time", row["ahead_ms"] / row["device_ms"] - 1, "", at_most=0.05)
            tell(f"{name}: same tokens", float(row["same"]), "", at_least=1.0)


if __name__ == "__main__":
    main()
