"""Import of Triton, where it can run: on a CUDA device, or in Triton's interpreter (TRITON_INTERPRET=1).

Elsewhere kernels are placeholders that cannot be launched, and callers use the torch reference unless `x.is_cuda`. A
CPU worker thus neither needs Triton nor waits for its import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

__all__ = [
    "cdiv",
    "descriptor",
    "has_fp8_casts",
    "has_tensor_memory",
    "has_tile_copies",
    "is_interpreted",
    "jit",
    "power_of_2",
    "reuses_tensor_memory",
    "spares_registers",
    "tl",
]

# See is_interpreted.
_CAN_LAUNCH = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"

if TYPE_CHECKING or _CAN_LAUNCH:
    # Triton 3.9 warns if this is unset; 3.10 changes the default to no fusion.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
else:
    tl = None


def jit(function: Callable[..., Any], *, do_not_specialize: Sequence[str] = (), anywhere: Sequence[str] = ()) -> Any:
    """Apply triton.jit if kernels can be launched.

    Arguments of kernels are pointers, numbers and tiles (tl.tensor), or compile-time values (tl.constexpr). For
    pointers, launches pass torch tensors. do_not_specialize: integers whose value is not worth a specialized
    compilation. anywhere: pointers that are not specialized for 16-byte alignment.
    """
    if not _CAN_LAUNCH:
        return function
    return triton.jit(function, do_not_specialize=do_not_specialize, do_not_specialize_on_alignment=anywhere)


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def descriptor(x: Tensor, block: list[int]) -> Any:
    """Return a descriptor that loads tiles of `block`, by TMA where available. x: 2-D, with 16-byte aligned rows."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def power_of_2(n: int) -> int:
    """Return the smallest power of two not below n, as Triton's tile sizes require."""
    return 1 << (n - 1).bit_length()


def has_fp8_casts(device: torch.device) -> bool:
    """Return True if the device converts e4m3 natively. Otherwise (and in the interpreter) kernels shift bits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def has_tile_copies(device: torch.device) -> bool:
    """Return True if the device copies tiles to shared memory by TMA, or in the interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def has_tensor_memory(device: torch.device) -> bool:
    """Return True if matrix units accumulate in tensor memory: 512 columns of 128 numbers per program."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (10, 11)


def reuses_tensor_memory() -> bool:
    """Return True if Triton reuses tensor memory for each sum (3.9 on); 3.6 to 3.8 use up to two areas per product."""
    return _version() >= (3, 9)


def spares_registers() -> bool:
    """Return True if Triton compiles long loops with fewer registers (3.8 and 3.9, unlike 3.6 and 3.7)."""
    return _version() >= (3, 8)


def _version() -> tuple[int, ...]:
    return tuple(map(int, triton.__version__.split(".")[:2]))
