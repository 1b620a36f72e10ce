"""The CPU kernels: C++ sources beside this file, compiled once per machine and kept in the user's cache.

Compiling takes some ten seconds, and only on a machine that has a C++ compiler; loading what is there, a millisecond. A
machine without a compiler, or a model in another dtype than bf16, computes with torch alone: see `open_kernels`.
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
from engine.cpu.processor import description
from engine.cpu.structs import Call, DraftDraws, Payload, Step, StoredRows, TokenChoices, Wire

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
# What both families of compilers call this processor: on ARM, -march=native is newer than many of them.
_NATIVE = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
FLAGS = ("-O3", _NATIVE, "-std=c++2a", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
_COMPILE_S = 300.0


class Kernels:
    """The compiled functions. They run on torch's own threads: both use the same OpenMP library."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the library cannot be loaded."""
        library = ctypes.CDLL(str(path))
        self.version = path.stem  # of sources, compiler and processor
        self.memory = HugePages()  # for what they read in each step
        library.may_use_tiles_here.restype = ctypes.c_bool  # one byte: what lies beside it is anything
        self.has_tiles: bool = library.may_use_tiles_here()  # AMX, and the system lets us
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
    """The kernels for models of this dtype on this device; None where torch alone is to compute."""
    return open_copies(device) if dtype == torch.bfloat16 else None


def open_copies(device: torch.device) -> Kernels | None:
    """The kernels that move bytes and choose tokens, whatever the model's dtype; None where torch is to do it."""
    return load_kernels() if device.type == "cpu" else None


class Program:
    """Calls, in order, that one team of threads goes through. What they point to belongs to whoever made them."""

    def __init__(self, kernels: Kernels, calls: Sequence[Call]) -> None:
        self._run = kernels.run
        self._calls = calls  # keeps their memory
        self._addresses = (c_void_p * len(calls))(*(ctypes.addressof(call) for call in calls))

    def run(self, step: Step, *, first: int = 0, end: int | None = None) -> None:
        """Carry out the calls [first, end), on as many threads as torch has been given."""
        step.threads = torch.get_num_threads()
        count = (len(self._calls) if end is None else end) - first
        self._run(ctypes.addressof(self._addresses) + first * ctypes.sizeof(c_void_p), count, ctypes.byref(step))


def _function(library: ctypes.CDLL, name: str, argument: type[ctypes.Structure]) -> Callable[[object], None]:
    """It takes a reference to such a struct."""
    function: ctypes._NamedFuncPointer = getattr(library, name)
    function.argtypes = (ctypes.POINTER(argument),)
    function.restype = None
    return function


@lru_cache(maxsize=1)
def load_kernels() -> Kernels | None:
    """This machine's kernels, compiled if need be, once a process; None where that cannot be done."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        logger.info("no C++ compiler: the engine computes with torch alone, more slowly")
        return None
    try:
        path = _place(compiler)
        if path.exists():
            try:
                return Kernels(path)
            except (OSError, AttributeError) as error:  # damaged, or not ours
                logger.warning("%s is made anew: %s", path, error)
                path.unlink(missing_ok=True)
        _compile(compiler, path)
        return Kernels(path)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        logger.warning("the CPU kernels cannot be used, torch alone computes: %s", detail)
        return None


def _place(compiler: str) -> Path:
    """Of the library for these sources, this compiler and this processor."""
    sources = sorted((*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")))
    facts = [compiler, _run(compiler, "--version"), *FLAGS, description(), *(path.read_text() for path in sources)]
    key = blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()
    return cache_root() / "kernels" / f"{key}.so"


def _compile(compiler: str, path: Path) -> None:
    """Unless a neighbour has done so meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=_COMPILE_S):  # one compiles, its neighbours wait
        if not path.exists():
            logger.info("compiling the CPU kernels into %s", path)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                built = Path(scratch) / path.name
                _run(compiler, *FLAGS, str(_SOURCES / "kernels.cpp"), "-o", str(built))
                move_whole(built, path)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S).stdout
