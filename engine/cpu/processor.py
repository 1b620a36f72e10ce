"""Detection of the processor and its instruction sets."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Instruction sets that speed up products and attention, by their Linux names; x86, then ARM.
_TELLING = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
# Lines of /proc/cpuinfo that determine a compiler's `native` target; x86, then ARM.
_NAMING = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")


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
