"""What this machine's processor is, and what it can do beyond the usual."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Those that products and attention are quicker by, as Linux calls them; of x86, then of ARM.
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
# How a compiler tells them apart; of x86, then of ARM.
_NAMING = ("model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant")


def description(cpuinfo: Path = CPUINFO) -> str:
    """All that a compiler's `native` depends on."""
    lines = _lines(cpuinfo)
    if lines is None:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(_NAMING)}))


def instruction_sets(cpuinfo: Path = CPUINFO) -> list[str]:
    """Such as ["avx2", "avx512f", "avx512_vnni", "avx512_bf16"]; the machine's name where its flags are not told."""
    flags = {word for line in _lines(cpuinfo) or () if line.startswith(("flags", "Features")) for word in line.split()}
    return [name for name in _TELLING if name in flags] or [platform.machine()]


def _lines(cpuinfo: Path) -> list[str] | None:
    try:
        return cpuinfo.read_text().splitlines()
    except OSError:
        return None
