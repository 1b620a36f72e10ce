"""Every kernel beside what the device can do: python -m tests.gpu_check.kernels [--rehearse]"""

from __future__ import annotations

import sys

from engine.tools.bench_kernels import bench_kernels
from tests.gpu_check.rows import skip, tell


def main() -> None:
    if "--rehearse" in sys.argv:
        skip("kernels", "a rehearsal")
        return
    found = bench_kernels()
    tell("copy", found["copy_gb_s"], "GB/s")
    tell("bf16 product", found["matmul_tflops"], "TFLOP/s")
    for row in found["kernels"]:
        tell(row["name"], row["share"], "of the device")


if __name__ == "__main__":
    main()
