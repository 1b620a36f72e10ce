"""Fake GPU whose tensors have shapes but no data, and on which launches only compile kernels.

Must be imported before the engine, in a process of its own, because Triton decides at import whether to interpret
kernels. Operations raise if they mix host and device tensors, read a value from the device, or depend on a value for a
shape. Between them, Recording also forbids copies.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

assert "engine.kernels.language" not in sys.modules
os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402

with_gpu = torch.cuda.is_available
torch.cuda.is_available = lambda: True
import engine.kernels.language  # noqa: E402, F401  which makes kernels only where there is a GPU

torch.cuda.is_available = with_gpu

import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

DEVICE = torch.device("cuda", 0)
_PROCESSORS = 132
# Shared memory per multiprocessor, from the CUDA programming guide's table of compute capabilities.
_SHARED_KIB = {(10, 0): 228, (9, 0): 228, (8, 0): 164}
# Instructions that make a loop slow: conversions of single numbers on a slow unit, byte loads from shared memory and
# register spills; and matrix products, which identify a loop.
_COUNTED = {
    "instructions": r"(?!NOP)",
    "conversions": r"(F2F|I2F|F2I)\.",
    "byte_loads": r"(LDS|LDG\.E)\.[US]8",
    "spills": r"(LDL|STL)",
    "products": r"([HIQ]G?MMA|\w*UTC\w*MMA)",
    # More than one per product: ptxas has serialized the products.
    "serialized": r"WARPGROUP\.ARRIVE",
}
# Address of every allocation; aligned.
_ADDRESS = 1 << 32
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_aten = torch.ops.aten
_LAUNCH_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "device"}


@dataclass(frozen=True)
class Launch:
    """Kernel compiled for a launch."""

    name: str
    grid: tuple[int, ...]
    shared_bytes: int
    registers: int
    # Spilled registers, bytes per thread.
    stack_bytes: int
    num_warps: int
    # For each innermost loop, the counts of _COUNTED.
    loops: tuple[dict[str, int], ...]
    ptx: str
    # 32-bit columns of tensor memory; a processor has 512, and a kernel that needs more traps.
    tensor_columns: int


@contextmanager
def absent_gpu(capability: tuple[int, int], *, disassembles: bool = True) -> Iterator[list[Launch]]:
    """Make "cuda" tensors belong to the absent device. Yields the list of compiled launches, one per compilation.

    disassembles: describe the machine code, too, which takes half a second per kernel.
    """
    compiled: set[str] = set()
    launches: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        # Kernels of other libraries choose the grid by their constants.
        grid = grid(options) if callable(grid) else grid
        assert len(grid) <= 3 and all(0 < count < 1 << 16 for count in grid[1:]), f"{self.__name__}: a grid of {grid}"
        with unset_fake_temporarily():
            named = {name: _described(value) for name, value in options.items()}
            kernel = run(self, *map(_described, arguments), grid=grid, warmup=True, **named)
            if kernel.hash not in compiled:
                compiled.add(kernel.hash)
                launches.append(_launch(self.__name__, grid, kernel, disassembles))

    torch.cuda.get_device_capability = lambda device=None: capability
    properties = SimpleNamespace(
        name="absent", multi_processor_count=_PROCESSORS, shared_memory_per_multiprocessor=_SHARED_KIB[capability] << 10
    )
    torch.cuda.get_device_properties = lambda device=None: properties
    driver.set_active(_Driver(10 * capability[0] + capability[1]))
    JITFunction.run = compile_only
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _WithoutCuda():
            yield launches
    finally:
        JITFunction.run = run


def print_launches(run: Callable[[str, list[Launch]], dict[str, Any] | None], *, disassembles: bool = True) -> None:
    """Run each case of the command line, and print its launches as JSON, with what `run` returns."""
    capability = tuple(int(number) for number in sys.argv[1].split("."))
    for case in sys.argv[2:]:
        with absent_gpu(capability, disassembles=disassembles) as launches:
            more = run(case, launches) or {}
        print(json.dumps({"case": case, "launches": [asdict(launch) for launch in launches]} | more), flush=True)


class Recording(TorchDispatchMode):
    """Stand-in for graph capture: operations raise if they read or write a host tensor.

    Appends the names of operations that launch a kernel to `launched`.
    """

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self._launched = launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        for x in (*_tensors(args), *_tensors(result)):
            # A number on the host becomes an argument of the kernel.
            assert x.is_cuda or x.dim() == 0, f"a recorded step uses a host tensor of shape {tuple(x.shape)} in {name}"
        assert name != "lift_fresh", "a recorded step makes a tensor of host data"
        if not func.is_view and name not in _LAUNCH_NOTHING:
            self._launched.append(name)
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


class _Driver:
    """Driver that describes the target device to Triton."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return DEVICE


@dataclass(frozen=True)
class _Pointer:
    """Tensor as seen by the compiler."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def ints(*shape: int) -> Tensor:
    """Return an int32 tensor without data."""
    return torch.empty(shape, dtype=torch.int32, device=DEVICE)


def numbers(*shape: int) -> Tensor:
    """Return a bf16 tensor without data."""
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)


def _described(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return replace(value, base=_described(value.base))
    if not isinstance(value, Tensor):
        return value
    assert value.is_cuda, "a kernel got a host tensor"
    return _Pointer(value.dtype, _ADDRESS + value.storage_offset() * value.dtype.itemsize)


def _launch(name: str, grid: tuple[int, ...], kernel: Any, disassembles: bool) -> Launch:
    used, code = "REG:0 STACK:0", ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        if disassembles:
            used, code = (
                subprocess.run(
                    [_TOOLS / "cuobjdump", what, file.name], check=True, capture_output=True, text=True
                ).stdout
                for what in ("-res-usage", "-sass")
            )
    registers, stack = (int(re.search(rf"\b{what}:(\d+)", used)[1]) for what in ("REG", "STACK"))
    metadata = kernel.metadata
    return Launch(
        name,
        grid,
        metadata.shared,
        registers,
        stack,
        metadata.num_warps,
        _innermost_loops(code),
        kernel.asm["ptx"],
        metadata.tmem_size or 0,
    )


def _innermost_loops(code: str) -> tuple[dict[str, int], ...]:
    """Count instructions between each backward jump and its target, for loops that contain no other loop."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", code)
    places = [(int(place, 16), name, operands) for place, name, operands in found]
    jumps = [
        (int(target[1], 16), place)
        for place, name, operands in places
        if name.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", operands)) and int(target[1], 16) < place
    ]
    innermost = [
        (first, last)
        for first, last in jumps
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in jumps)
    ]
    return tuple(
        {
            what: sum(first <= place <= last and re.match(pattern, name) is not None for place, name, _ in places)
            for what, pattern in _COUNTED.items()
        }
        for first, last in innermost
    )


class _WithoutCuda(TorchFunctionMode):
    """Replaces operations that torch's Python binding refuses for CUDA tensors in builds without CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instead = _INSTEAD.get(getattr(function, "__name__", ""))
        if instead is None or not isinstance(args[0], FakeTensor):
            return function(*args, **(kwargs or {}))
        return instead(*args)


def _get(x: Tensor, index: Any) -> Tensor:
    view, tensors = _cut(x, index)
    return _aten.index.Tensor(view, tensors) if tensors else view


def _set(x: Tensor, index: Any, value: Tensor | float) -> None:
    view, tensors = _cut(x, index)
    if not isinstance(value, Tensor):
        assert not tensors
        view.fill_(value)
    elif tensors:
        _aten.index_put_(view, tensors, value)
    else:
        _copy(view, value)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    assert torch.broadcast_shapes(target.shape, source.shape) == target.shape
    assert source.device == target.device, f"a copy from {source.device} to {target.device}"
    return target


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else torch.clone(x, memory_format=torch.contiguous_format)


def _cut(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return the view selected by an index's integers and slices, and its tensors per dimension up to the last one."""
    tensors: list[Tensor | None] = []
    dim = 0
    parts = index if isinstance(index, tuple) else (index,)
    for i, part in enumerate(parts):
        if part is Ellipsis:
            dim = x.dim() - sum(rest is not None for rest in parts[i + 1 :])
        elif part is None:
            x, dim = _aten.unsqueeze(x, dim), dim + 1
        elif isinstance(part, int):
            x = _aten.select.int(x, dim, part)
        elif isinstance(part, slice):
            x, dim = _aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1), dim + 1
        else:
            tensors += [None] * (dim - len(tensors)) + [part]
            dim += 1
    return x, tensors


_INSTEAD: dict[str, Callable[..., Any]] = {
    "__getitem__": _get,
    "__setitem__": _set,
    "copy_": _copy,
    "contiguous": _contiguous,
}
