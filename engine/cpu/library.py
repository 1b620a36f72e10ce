"""Build and loading of the CPU kernels: C++ sources beside this file, compiled once per machine and cached.

Compiling takes about half a minute and needs a C++ compiler; loading a cached library takes a millisecond. Without a
compiler, or for dtypes other than bf16, torch computes everything; see `open_kernels`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import torch
from filelock import FileLock

from core.model.source import cache_root
from core.process.atomic_file import move_whole
from engine.cpu.huge_pages import HugePages
from engine.cpu.structs import Call, DraftDraws, Payload, Step, StoredRows, TokenChoices, Wire

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
# Name of the build machine's processor: on ARM, -march=native is missing in many compilers.
_NATIVE = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
FLAGS = ("-O3", _NATIVE, "-std=c++2a", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
_COMPILE_S = 900.0
CPUINFO = Path("/proc/cpuinfo")
# Instruction sets that speed up products and attention, by their Linux names; x86, then ARM.
_TELLING = "avx2 avx512f avx_vnni avx512_vnni avx512_bf16 amx_int8 amx_bf16 asimd asimddp i8mm bf16 sve".split()
# Lines of /proc/cpuinfo that determine a compiler's `native` target; x86, then ARM.
_NAMING = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")


class Kernels:
    """Compiled functions. They run on torch's OpenMP threads, since both use the same OpenMP library."""

    def __init__(self, path: Path) -> None:
        """Load the library at `path`. Raises OSError."""
        library = ctypes.CDLL(str(path))
        # Hash of sources, compiler and processor.
        self.version = path.stem
        # Allocator for data that kernels read in every step.
        self.memory = HugePages()
        # The C function returns one byte; the default restype would read four.
        library.may_use_tiles_here.restype = ctypes.c_bool
        # True if the processor has AMX and the system permits its use.
        self.has_tiles: bool = library.may_use_tiles_here()
        self.run = library.run
        self.run.argtypes = (c_void_p, c_int64, ctypes.POINTER(Step))
        self.run.restype = None
        self.widen_stored_rows = _function(library, "widen_stored_rows", StoredRows)
        self.choose = _function(library, "choose", TokenChoices)
        self.draw_drafts = _function(library, "draw_drafts", DraftDraws)
        self.pack_wire = _function(library, "pack_wire", Wire)
        self.unpack_wire = _function(library, "unpack_wire", Wire)
        self.add_up_payload = _function(library, "add_up_payload", Payload)


def open_kernels(*, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """Return the kernels for models of this dtype on this device; None to compute with torch."""
    return open_copies(device) if dtype == torch.bfloat16 else None


def open_copies(device: torch.device) -> Kernels | None:
    """Return the kernels that copy bytes and choose tokens, for any model dtype; None to use torch."""
    return load_kernels() if device.type == "cpu" else None


class Program:
    """Sequence of calls that one team of threads executes. The caller owns the memory that they point to."""

    def __init__(self, kernels: Kernels, calls: Sequence[Call]) -> None:
        self._run = kernels.run
        # Keeps the call structs alive.
        self._calls = calls
        self._addresses = (c_void_p * len(calls))(*(ctypes.addressof(call) for call in calls))

    def run(self, step: Step, *, first: int = 0, end: int | None = None) -> None:
        """Execute calls [first, end) on torch's number of threads."""
        step.threads = torch.get_num_threads()
        count = (len(self._calls) if end is None else end) - first
        self._run(ctypes.addressof(self._addresses) + first * ctypes.sizeof(c_void_p), count, ctypes.byref(step))


def _function(library: ctypes.CDLL, name: str, argument: type[ctypes.Structure]) -> Callable[[object], None]:
    """Look up a function that takes a pointer to `argument`."""
    function: ctypes._NamedFuncPointer = getattr(library, name)
    function.argtypes = (ctypes.POINTER(argument),)
    function.restype = None
    return function


@lru_cache(maxsize=1)
def load_kernels() -> Kernels | None:
    """Return this machine's kernels, compiled on first use and cached per process; None if unavailable."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        logger.info("no C++ compiler found: CPU kernels disabled, using slower torch operations")
        return None
    try:
        path = _place(compiler)
        if path.exists():
            try:
                return Kernels(path)
            # The cached library is damaged or foreign.
            except (OSError, AttributeError) as error:
                logger.warning("rebuilding CPU kernels path=%s error=%s", path, error)
                path.unlink(missing_ok=True)
        _compile(compiler, path)
        return Kernels(path)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("CPU kernels unavailable, using torch: %s", detail)
        return None


def _place(compiler: str) -> Path:
    """Return the library's path for these sources, this compiler and this processor."""
    sources = sorted((*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")))
    facts = [
        compiler,
        _run(compiler, "--version"),
        *FLAGS,
        description(),
        *(path.read_text(encoding="utf-8") for path in sources),
    ]
    key = blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()
    return cache_root() / "kernels" / f"{key}.so"


def _compile(compiler: str, path: Path) -> None:
    """Compile unless another process has done so; one process compiles, others wait for the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=_COMPILE_S):
        if not path.exists():
            logger.info("compiling CPU kernels path=%s", path)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                built = Path(scratch) / path.name
                _run(compiler, *FLAGS, str(_SOURCES / "kernels.cpp"), "-o", str(built))
                move_whole(built, path)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S).stdout


def description(cpuinfo: Path = CPUINFO) -> str:
    """Return everything that a compiler's `native` target depends on."""
    lines = _lines(cpuinfo)
    if lines is None:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(_NAMING)}))


def instruction_sets(cpuinfo: Path = CPUINFO) -> list[str]:
    """Return names such as ["avx2", "avx512f", "avx512_vnni", "avx512_bf16"]; the machine's name if none is listed."""
    flags = {word for line in _lines(cpuinfo) or () if line.startswith(("flags", "Features")) for word in line.split()}
    return [name for name in _TELLING if name in flags] or [platform.machine()]


def _lines(cpuinfo: Path) -> list[str] | None:
    try:
        return cpuinfo.read_text().splitlines()
    except OSError:
        return None
