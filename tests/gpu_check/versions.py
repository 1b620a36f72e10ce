"""Versions and devices of this machine, one row each."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Any

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
    elif why := no_device(torch):
        tell("device", why, has_failed=True)
    else:
        properties = torch.cuda.get_device_properties(0)
        tell("device", properties.name)
        tell("compute capability", f"{properties.major}.{properties.minor}")
        tell("memory", properties.total_memory / 2**30, "GiB")
        free, total = torch.cuda.mem_get_info(0)
        # Another process uses the GPU: parts that take all memory would fail, and timed parts would be slow.
        tell("memory that nobody has", free / total, "of it", at_least=_LEAST_FREE)
        tell("processors", properties.multi_processor_count)
        tell("CUDA of torch", str(torch.version.cuda))
        tell("NCCL of torch", ".".join(map(str, torch.cuda.nccl.version())))


def no_device(torch: Any) -> str:
    """Return why torch has no usable GPU and how to fix it; empty if it has one."""
    if torch.version.cuda is None:
        return f"none: torch {torch.__version__} was built without CUDA; install PyPI's for Linux on x86_64"
    try:
        torch.cuda.init()
    except RuntimeError as error:  # no driver, or one older than torch's CUDA
        reason = " ".join(str(error).split()).partition(". ")[0]
        return f"none: torch is built for CUDA {torch.version.cuda}, and says: {reason}"
    return "" if torch.cuda.device_count() else "none that torch sees: is CUDA_VISIBLE_DEVICES set?"


if __name__ == "__main__":
    main()
