"""What is said of a processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cpu import processor

_SAPPHIRE_RAPIDS = """\
model name\t: Intel(R) Xeon(R) Platinum 8481C
flags\t\t: fpu sse4_2 avx avx2 avx512f avx512bw avx_vnni avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8
"""
_GRAVITON = "processor\t: 0\nFeatures\t: fp asimd aes asimddp bf16 i8mm\n"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (_SAPPHIRE_RAPIDS, ["avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"]),
        (_GRAVITON, ["asimd", "i8mm", "bf16"]),
    ],
)
def test_what_it_can_do_is_named_as_linux_does(tmp_path: Path, told: str, expected: list[str]) -> None:
    (tmp_path / "cpuinfo").write_text(told)
    assert processor.instruction_sets(tmp_path / "cpuinfo") == expected


def test_where_nothing_is_told_there_is_still_a_name(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert len(processor.instruction_sets(none)) == 1 and processor.description(none)
