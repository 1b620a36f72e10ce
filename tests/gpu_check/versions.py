"""What there is on this machine, one row each."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

import torch

from tests.gpu_check.rows import skip, tell

_PACKAGES = ("torch", "triton", "numpy", "grpcio", "nixl", "flashinfer-python", "ray", "redis")

_LEAST_FREE = 0.9


def main() -> None:
    tell("Python", platform.python_version())
    for package in _PACKAGES:
        try:
            tell(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            skip(package, "not installed")
    if "--rehearse" in sys.argv:
        skip("device", "none: a rehearsal")
    elif not torch.cuda.is_available():
        tell("device", "torch sees no CUDA device", has_failed=True)
    else:
        properties = torch.cuda.get_device_properties(0)
        tell("device", properties.name)
        tell("compute capability", f"{properties.major}.{properties.minor}")
        tell("memory", properties.total_memory / 2**30, "GiB")
        free, total = torch.cuda.mem_get_info(0)
        # Somebody else is there: what takes all memory would fail, and what is timed would be slow.
        tell("memory that nobody has", free / total, "of it", at_least=_LEAST_FREE)
        tell("processors", properties.multi_processor_count)
        tell("CUDA of torch", str(torch.version.cuda))
        tell("NCCL of torch", ".".join(map(str, torch.cuda.nccl.version())))


if __name__ == "__main__":
    main()
