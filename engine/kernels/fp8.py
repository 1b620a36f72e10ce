"""FP8 e4m3 with one scale per row.

    scale = bf16_up(max|x| / 448)      codes = e4m3(x / scale)      x ~ codes * scale

bf16_up rounds to bfloat16 away from zero, so that no code exceeds 448. Append-only: a row is never requantised.
Format: Micikevicius et al. 2022, arXiv:2209.05433 (e4m3: largest finite value 448, no infinities).
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0
_TINY = 2.0**-120  # the scale of an all-zero row: any positive number whose inverse is finite


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row (the last dimension) to e4m3 with its own scale.

    x: (..., D) bf16, fp16 or fp32. Returns codes (..., D) float8_e4m3fn and scales (...) bfloat16, always positive.
    NaN stays NaN; infinities become NaN.
    """
    x = x.float()
    scales = _round_up_to_bf16((x.abs().amax(dim=-1) / FP8_MAX).clamp_min(_TINY))
    codes = (x / scales.float().unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes, scales


def dequantize_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes (..., D) float8_e4m3fn, scales (...) bfloat16 -> (..., D) of `dtype`.

    A row that held NaN or infinity has a scale that is neither, and nothing finite comes back.
    """
    values = codes.float() if codes.device.type != "cpu" else _widen_on_cpu(codes)
    return values.mul_(scales.float().unsqueeze(-1)).to(dtype)


def _widen_on_cpu(codes: Tensor) -> Tensor:
    """codes.float() by whole vectors, where torch's own cast goes number by number; NaN becomes 480.

    The bits of e4m3 at the same end of an fp32 number are the same number with an exponent that is 120 too small:
        s eeee mmm  ->  s 0000eeee mmm00000000000000000000
    """
    bits = codes.view(torch.int8).to(torch.int32)  # keeps the sign
    bits.bitwise_left_shift_(20).bitwise_and_(-(1 << 31) | 0x7F << 20)
    return bits.view(torch.float32).mul_(2.0**120)


def _round_up_to_bf16(x: Tensor) -> Tensor:
    """The nearest bfloat16 not below x. x: positive fp32."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32).to(torch.bfloat16)
