"""Triton, where something can run it: a CUDA device, or Triton's own interpreter (TRITON_INTERPRET=1).

Everywhere else kernels are names that refuse to be launched, and what calls them takes the torch reference: one rule,
`x.is_cuda`. So a CPU worker neither needs Triton nor waits for its import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where nobody says which; 3.10 will not fuse
    import triton
    import triton.language as tl

    jit = triton.jit
else:
    tl: Any = None

    def jit(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
        return jit if function is None else function


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below n: Triton's tiles have no other sizes."""
    return 1 << (n - 1).bit_length()


def has_fp8_casts(device: torch.device) -> bool:
    """Whether the device turns e4m3 into other floats itself. Elsewhere (and in the interpreter) we move the bits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
