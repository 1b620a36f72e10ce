"""CPU kernels for another processor, run in an emulator; a drop-in replacement for Kernels."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from engine.cpu.huge_pages import HugePages
from engine.cpu.library import Kernels

ARCHITECTURES = ("armv8-a", "armv8.2-a+dotprod", "armv8.6-a+bf16+i8mm")
_COMPILER, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_SOURCE = Path(__file__).parent / "other_processor.cpp"
_FLAGS = ("-O2", "-std=c++2a", "-fopenmp", "-static", "-Wno-psabi")
_WINDOW, _HIGHEST = 1 << 40, 0x7F << 40
_MAY_READ_ME, _ANYBODY = 0x59616D61, -1  # prctl: PR_SET_PTRACER


def can_emulate() -> bool:
    return all(shutil.which(tool) for tool in (_COMPILER, _EMULATOR)) and os.uname().machine == "x86_64"


class EmulatedKernels(Kernels):
    """Emulator process that executes functions by name and addresses. `close` ends it."""

    def __init__(self, architecture: str, directory: Path) -> None:
        built = directory / architecture
        command = [_COMPILER, *_FLAGS, f"-march={architecture}", str(_SOURCE), "-o", str(built)]
        subprocess.run(command, check=True, timeout=600)
        ctypes.CDLL(None).prctl(_MAY_READ_ME, ctypes.c_ulong(_ANYBODY), 0, 0, 0)
        self.version = architecture
        self.memory = HugePages()
        self.has_tiles = False
        heap = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]"))
        low = int(heap.split("-")[0], 16) // _WINDOW * _WINDOW
        command = [_EMULATOR, "-cpu", "max", str(built), f"/proc/{os.getpid()}/mem", str(low), str(_HIGHEST)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.run = self._ask("run")
        self.widen_stored_rows = self._ask("widen_stored_rows")
        self.choose = self._ask("choose")
        self.pack_wire = self._ask("pack_wire")
        self.unpack_wire = self._ask("unpack_wire")
        self.add_up_payload = self._ask("add_up_payload")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()

    def _ask(self, name: str) -> Callable[..., None]:
        def ask(*arguments: object) -> None:
            words = [str(_address(argument)) for argument in arguments]
            assert self._process.stdin is not None and self._process.stdout is not None
            print(name, *words, *("0" for _ in range(3 - len(words))), file=self._process.stdin, flush=True)
            assert self._process.stdout.readline() == "done\n", (
                f"{name}: the emulator exited with {self._process.wait()}"
            )

        return ask


def _address(argument: object) -> int:
    """Return the address of a struct or of a `byref`; integers are returned unchanged."""
    if isinstance(argument, int):
        return argument
    if isinstance(argument, ctypes.Structure):
        return ctypes.addressof(argument)
    return ctypes.cast(argument, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
