"""Triton's interpreter: inline PTX, and a counter of bytes read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import Tensor


@dataclass
class Counted:
    num_bytes: int = 0


@contextmanager
def count_reads(*tensors: Tensor) -> Iterator[Counted]:
    """Count loads; bytes read repeatedly, by one or several programs, count each time."""
    from triton.runtime.interpreter import InterpreterBuilder

    spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    counted, load = Counted(), InterpreterBuilder.create_masked_load

    def counting(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = np.asarray(pointers.data)[np.broadcast_to(np.asarray(mask.data), np.shape(pointers.data))]
        for first, end in spans:
            counted.num_bytes += size * int(((addresses >= first) & (addresses < end)).sum())
        return load(self, pointers, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", counting)
        yield counted


_Words = np.ndarray[Any, np.dtype[np.uint32]]


@contextmanager
def inline_ptx() -> Iterator[None]:
    """Let kernels with PTX of one or two 16-bit numbers per register run in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create(self: Any, code: str, constraints: str, inputs: Any, types: Any, is_pure: bool, pack: int) -> Any:
        assert pack == 2 and all(handle.data.itemsize == 2 for handle in inputs)
        words = [np.ascontiguousarray(handle.data).view(np.uint32) for handle in inputs]
        num_outputs = constraints.count("=")
        results = _run(code, {f"${num_outputs + i}": word for i, word in enumerate(words)})
        handles = [
            TensorHandle(results[f"${i}"].view(np.uint16), kind.scalar) for i, kind in enumerate(types[:num_outputs])
        ]
        return SimpleNamespace(get_result=handles.__getitem__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_inline_asm", create)
        yield


def _run(code: str, registers: dict[str, _Words]) -> dict[str, _Words]:
    def read(operand: str) -> Any:
        return registers[operand] if operand in registers else np.uint32(int(operand, 0) & 0xFFFFFFFF)

    for line in code.strip().strip("{}").split(";"):
        name, _, operands = line.strip().partition(" ")
        if name and name != ".reg":
            target, *sources = re.split(r",\s*", operands)
            registers[target] = _OPERATIONS[name](*map(read, sources))
    return registers


def _lop3(a: Any, b: Any, c: Any, table: Any) -> Any:
    """Apply the Boolean function whose values, for the bits of a, b and c as a number, are the bits of `table`."""
    terms = (
        (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8) if int(table) >> i & 1
    )
    return np.bitwise_or.reduce(np.broadcast_arrays(*terms))


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    """Select four of eight bytes; a selector's upper bit asks for eight copies of the byte's sign."""
    both, result = np.uint64(a) | np.uint64(b) << np.uint64(32), np.uint32(0)
    for place in range(4):
        of_place = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = (both >> np.uint64(8) * (of_place & np.uint32(7)).astype(np.uint64)).astype(np.uint32) & np.uint32(255)
        sign = (byte >> np.uint32(7)) * np.uint32(255)
        result = result | np.where(of_place & np.uint32(8), sign, byte) << np.uint32(8 * place)
    return result


def _fma_of_bf16_pairs(a: Any, b: Any, c: Any) -> Any:
    def half(word: Any, place: int) -> Any:
        return (word >> np.uint32(16 * place) << np.uint32(16)).view(np.float32).astype(np.float64)

    a, b, c = np.broadcast_arrays(a, b, c)
    a, b, c = (np.ascontiguousarray(each) for each in (a, b, c))
    result = np.zeros_like(a)
    for place in (0, 1):
        wide = (half(a, place) * half(b, place) + half(c, place)).astype(np.float32).view(np.uint32)
        rounded = wide + np.uint32(0x7FFF) + (wide >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
        result |= rounded << np.uint32(16 * place)
    return result


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n,
    "shr.b32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "shf.r.wrap.b32": lambda a, b, n: a >> n | b << np.uint32(32) - n if n else a,
    "fma.rn.bf16x2": _fma_of_bf16_pairs,
}
