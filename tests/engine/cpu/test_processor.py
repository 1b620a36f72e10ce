"""Detection of processors and instruction sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cpu.library import description, instruction_sets

_SAPPHIRE_RAPIDS = """\
model name\t: Intel(R) Xeon(R) Platinum 8481C
flags\t\t: fpu sse4_2 avx avx2 avx512f avx512bw avx_vnni avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8
"""
# Composed by hand from the documented features of this processor.
_GRAVITON_3 = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 \
sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1
"""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (_SAPPHIRE_RAPIDS, ["avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"]),
        (_GRAVITON_3, ["asimd", "asimddp", "i8mm", "bf16", "sve"]),
    ],
)
def test_instruction_sets_have_linux_names(tmp_path: Path, content: str, expected: list[str]) -> None:
    (tmp_path / "cpuinfo").write_text(content)
    assert instruction_sets(tmp_path / "cpuinfo") == expected


def test_arm_processors_are_distinguished_by_part_number(tmp_path: Path) -> None:
    """They have no model name, and code compiled for one may not run on another."""
    (tmp_path / "one").write_text(_GRAVITON_3)
    (tmp_path / "other").write_text(_GRAVITON_3.replace("0xd40", "0xd4f"))
    assert description(tmp_path / "one") != description(tmp_path / "other")


def test_machine_name_is_the_fallback(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert len(instruction_sets(none)) == 1 and description(none)
