"""FP8 e4m3 with one scale per row.

    scale = bf16_up(max|x| / 448)      codes = e4m3(x / scale)      x ~ codes * scale

bf16_up rounds to bfloat16 away from zero, so that no code exceeds 448. Append-only: a row is never requantised.
Format: Micikevicius et al. 2022, arXiv:2209.05433 (e4m3: largest finite value 448, no infinities).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.language import jit, tl

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


def quantize_rows(x: Tensor, exact: int) -> tuple[Tensor, Tensor]:
    """Quantise each row but for its last `exact` numbers, which stay in bf16 and take the place of two codes each.

    x: (..., D). Returns codes (..., D + exact) float8_e4m3fn, the last 2 * exact of which are bytes of bf16, and scales
    (...) bfloat16.
    """
    if not exact:
        return quantize_fp8(x)
    codes, scales = quantize_fp8(x[..., :-exact])
    kept = x[..., -exact:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat((codes.view(torch.uint8), kept), dim=-1).view(torch.float8_e4m3fn), scales


def dequantize_rows(codes: Tensor, scales: Tensor, exact: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize_rows`: codes (..., D + exact) -> (..., D) of `dtype`."""
    if not exact:
        return dequantize_fp8(codes, scales, dtype)
    numbers = dequantize_fp8(codes[..., : -2 * exact].contiguous(), scales, dtype)
    kept = codes[..., -2 * exact :].contiguous().view(torch.bfloat16)
    return torch.cat((numbers, kept.to(dtype)), dim=-1)


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


# The same for Triton's kernels. Codes are bytes there (uint8), for not every device has the type.


@jit
def quantize_row(x, mask):
    """x (N, D) fp32, masked-off places zero -> code bytes (N, D), scales (N, 1) fp32 that are exact in bf16."""
    largest = tl.max(tl.where(mask, tl.abs(x), 0.0), axis=1, keep_dims=True)
    scale = tl.maximum(tl.div_rn(largest, 448.0), 7.52316384526264e-37)  # 2^-120
    bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    scale = bits.to(tl.float32, bitcast=True)
    return to_code(tl.div_rn(x, scale)), scale


@jit
def to_code(x):
    """fp32 within +-448 -> e4m3 bits, to nearest, ties to even; NaN stays NaN.

    Done by hand, because Triton's interpreter rounds 31.19 to 16, and the type is missing below compute capability 8.9.
    """
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    tiny = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # below 2^-6: multiples of 2^-9
    code = tl.where(magnitude < 0.015625, tiny, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@jit
def from_code(code, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """e4m3 bytes -> `dtype`, exactly. NATIVE: see has_fp8_casts; without it NaN becomes 480, as in _widen_on_cpu."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(dtype)
    bits = code.to(tl.int8, bitcast=True).to(tl.int32) << 20
    return ((bits & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120
