"""Triton, where something can run it: a CUDA device, or Triton's own interpreter (TRITON_INTERPRET=1).

Everywhere else kernels are names that refuse to be launched, and what calls them takes the torch reference: one rule,
`x.is_cuda`. So a CPU worker neither needs Triton nor waits for its import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

__all__ = [
    "Kernel",
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

_CAN_LAUNCH = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"  # see is_interpreted

if TYPE_CHECKING or _CAN_LAUNCH:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where nobody says which; 3.10 will not fuse
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
else:
    tl = None


class Kernel(Protocol):
    """A function in Triton's language. Its arguments are pointers, numbers and tiles (all of them tl.tensor), or values
    that it is compiled for (tl.constexpr)."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """What launches so many programs; a tensor of torch is given where the kernel takes a pointer."""
        ...

    def __call__(self, *arguments: Any) -> Any:
        """Inside another kernel only."""
        ...


def jit(function: Callable[..., Any], *, do_not_specialize: Sequence[str] = (), anywhere: Sequence[str] = ()) -> Kernel:
    """triton.jit, where kernels can be launched. do_not_specialize: numbers whose value is not worth compiling for.
    anywhere: pointers for which it is not worth either that they are multiples of 16."""
    if not _CAN_LAUNCH:
        return cast(Kernel, function)
    options = {"do_not_specialize": do_not_specialize, "do_not_specialize_on_alignment": anywhere}
    return cast(Kernel, triton.jit(function, **options))


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def descriptor(x: Tensor, block: list[int]) -> Any:
    """What a kernel loads tiles of that shape with, by the device's own copies where it has them. x: of two dimensions,
    rows of a multiple of 16 bytes."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below n: Triton's tiles have no other sizes."""
    return 1 << (n - 1).bit_length()


def has_fp8_casts(device: torch.device) -> bool:
    """Whether the device turns e4m3 into other floats itself. Elsewhere (and in the interpreter) we move the bits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def has_tile_copies(device: torch.device) -> bool:
    """Whether the device copies whole tiles into shared memory by itself. (So does the interpreter.)"""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def has_tensor_memory(device: torch.device) -> bool:
    """Whether matrix units sum in a memory of their own: 512 columns of 128 numbers, for what a program has of each."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (10, 11)


def reuses_tensor_memory() -> bool:
    """Whether Triton has one place there for each sum of a program, as 3.9; 3.6 to 3.8 have up to two a product."""
    return _version() >= (3, 9)


def spares_registers() -> bool:
    """Whether Triton compiles long loops with fewer registers, as 3.8 and 3.9 do; 3.6 and 3.7 need more."""
    return _version() >= (3, 8)


def _version() -> tuple[int, ...]:
    return tuple(map(int, triton.__version__.split(".")[:2]))
