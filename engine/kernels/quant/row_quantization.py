"""Quantization of rows with one scale per row, as e4m3, int8, or rotated int4.

    scale = bf16_up(max|x| / most)      x ~ code * scale      code = e4m3(x / scale), most = 448
                                                              code = nearest(x / scale), most = 127

    int4: y = rotate(x)     scale = bf16_up((max y - min y) / 15)     zero = bf16(min y + 8 scale)
                            y ~ zero + (code - 8) scale               code = 8 + nearest((y - zero) / scale), 0 to 15

bf16_up rounds to bfloat16 away from zero, so that no code exceeds `most`. Append-only: a row is never requantized.
The steps of e4m3 are relative, up to 1/8 of a number; those of int8 are all 1/127 of the row's largest. In keys a few
large numbers decide the scores, so int8 loses less; rows that span many octaves lose less in e4m3. int4 has 16 codes
only, so its rows are rotated first (hadamard.py), which spreads large numbers.
Format: Micikevicius et al. 2022, arXiv:2209.05433 (e4m3: largest finite value 448, no infinities). Two int4 codes share
a byte, the first in its low bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.language import is_interpreted, jit, tl
from engine.kernels.quant.hadamard import rotate, rotate_tile, unrotate

# Largest code of each 8-bit dtype.
MOST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
# Dtype that stands for int4: bytes of two codes.
INT4 = torch.uint8
# Dtype of each format's scales. An int4 row has the bits of a bf16 scale and, in the upper half, of its bf16 zero.
SCALES = {torch.float8_e4m3fn: torch.bfloat16, torch.int8: torch.bfloat16, INT4: torch.int32}
# Scale of an all-zero row: any positive number with a finite inverse.
_TINY = 2.0**-120
_NAN = 0x7FC00000


def quantize_rows(x: Tensor, dtype: torch.dtype, *, exact: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize each row (last dimension) with its own scale, except for its last `exact` numbers, kept in bf16.

    x: (..., D) bf16, fp16 or fp32. Returns codes (..., D + exact) of `dtype`, float8_e4m3fn or int8, whose last 2 *
    exact are bytes of bf16, and scales (...) bfloat16, always positive. dtype INT4: codes (..., D / 2), and scales of
    SCALES; all numbers are quantized.
    A row with NaN or infinity gets a non-finite scale and dequantizes to non-finite values.
    """
    if dtype == INT4:
        return _quantize_int4(rotate(x.float()))
    if not exact:
        return _quantize(x.float(), dtype)
    codes, scales = _quantize(x[..., :-exact].float(), dtype)
    tail = x[..., -exact:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat((codes.view(torch.uint8), tail), dim=-1).view(dtype), scales


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype, *, exact: int = 0) -> Tensor:
    """Dequantize codes (..., D + exact) with scales (...) to (..., D) of `dtype`; the inverse of `quantize_rows`."""
    if codes.dtype == INT4:
        return unrotate(_dequantize_int4(codes, scales)).to(dtype)
    if not exact:
        return _widen(codes).mul_(scales.float().unsqueeze(-1)).to(dtype)
    numbers = dequantize_rows(codes[..., : -2 * exact].contiguous(), scales, dtype)
    tail = codes[..., -2 * exact :].contiguous().view(torch.bfloat16)
    return torch.cat((numbers, tail.to(dtype)), dim=-1)


def as_bytes(x: Tensor) -> Tensor:
    """View float8 as bytes; other tensors are unchanged.

    torch indexing supports little float8, and Triton has none below compute capability 8.9.
    """
    return x.view(torch.uint8) if x.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) else x


def _quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(dim=-1)
    # Divide by a tensor: on a GPU, dividing by a host number multiplies by its inverse and may differ in the last bit.
    scales = _round_up_to_bf16((largest / torch.full_like(largest, MOST[dtype])).clamp_min(_TINY))
    x = x / scales.float().unsqueeze(-1)
    return (x.to(dtype) if dtype.is_floating_point else x.round_().nan_to_num_(0.0).to(dtype)), scales


def _quantize_int4(y: Tensor) -> tuple[Tensor, Tensor]:
    least, most = y.amin(dim=-1), y.amax(dim=-1)
    spread = most - least
    scales = _round_up_to_bf16((spread / torch.full_like(spread, 15.0)).clamp_min(_TINY))
    zeros = (least + 8 * scales.float()).to(torch.bfloat16)
    codes = (y - zeros.float().unsqueeze(-1)).div_(scales.float().unsqueeze(-1))
    codes = codes.round_().clamp_(-8, 7).add_(8).nan_to_num_(0.0).to(torch.uint8)
    pairs = codes[..., ::2] | codes[..., 1::2] << 4
    return pairs, torch.stack((scales, zeros), dim=-1).view(torch.int32).squeeze(-1)


def _dequantize_int4(codes: Tensor, scales: Tensor) -> Tensor:
    scale, zero = torch.split(scales.unsqueeze(-1).view(torch.bfloat16).float(), 1, dim=-1)
    y = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).float()
    return y.sub_(8).mul_(scale).add_(zero)


def _widen(codes: Tensor) -> Tensor:
    """Return codes.float() as a new tensor. On a CPU e4m3 is vectorized, unlike torch's own cast; NaN becomes 480.

    The bits of e4m3 at the top of an fp32 number are the same number with an exponent that is 120 too small:
        s eeee mmm  ->  s 0000eeee mmm00000000000000000000
    """
    if codes.dtype == torch.int8 or codes.device.type != "cpu":
        return codes.float()
    # Sign-extended.
    bits = codes.view(torch.int8).to(torch.int32)
    bits.bitwise_left_shift_(20).bitwise_and_(-(1 << 31) | 0x7F << 20)
    return bits.view(torch.float32).mul_(2.0**120)


def _round_up_to_bf16(x: Tensor) -> Tensor:
    """Return the nearest bfloat16 not below x. x: positive fp32."""
    # Clamp, because a GPU's NaN is all ones and the addition would overflow.
    bits = x.contiguous().view(torch.int32).clamp_max(_NAN)
    return ((bits + 0xFFFF) & -0x10000).view(torch.float32).to(torch.bfloat16)


# The same in Triton. The dtype of the codes selects the format: uint8 for e4m3 bits, or int8.

_FUSES = tl.constexpr(not is_interpreted()) if tl else None


@jit
def quantize_row(x: tl.tensor, mask: tl.tensor, codes: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Quantize x (N, D) fp32, zero where masked off. Returns codes (N, D) and scales (N, 1) fp32, exact in bf16."""
    # As integers, magnitudes keep their order and NaN is the largest.
    sizes = tl.abs(x).to(tl.int32, bitcast=True)
    largest = tl.max(tl.where(mask, sizes, 0), axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    most: tl.constexpr = 127.0 if codes == tl.int8 else 448.0
    bits = tl.div_rn(largest, most).to(tl.int32, bitcast=True)
    bits = tl.minimum(tl.maximum(bits, 0x03800000), 0x7FC00000)  # 2^-120, NaN
    scale = ((bits + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    x = _divide(x, scale)
    return to_int8(x) if codes == tl.int8 else to_e4m3(x), scale


@jit
def quantize_int4(x: tl.tensor, D: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Quantize x (N, BLOCK_D) fp32, zero from D on. Returns bytes (N, BLOCK_D / 2) and int32 scales (N, 1)."""
    y = rotate_tile(x, D)
    is_number = (tl.arange(0, x.shape[1]) < D)[None, :]
    least = tl.min(tl.where(is_number, y, float("inf")), axis=1, keep_dims=True)
    most = tl.max(tl.where(is_number, y, -float("inf")), axis=1, keep_dims=True)
    # NaN if a number is not finite.
    spread = most - least + tl.sum(y - y, axis=1, keep_dims=True)
    bits = tl.abs(tl.div_rn(spread, 15.0)).to(tl.int32, bitcast=True)
    bits = (tl.minimum(tl.maximum(bits, 0x03800000), 0x7FC00000) + 0xFFFF) & -0x10000
    scale = bits.to(tl.float32, bitcast=True)
    zero_bits = (least + 8.0 * scale).to(tl.int32, bitcast=True)
    zero_bits = (zero_bits + 0x7FFF + ((zero_bits >> 16) & 1)) & -0x10000
    steps = _divide(y - zero_bits.to(tl.float32, bitcast=True), scale)
    steps = tl.minimum(tl.maximum(steps, -8.0), 7.0)
    codes = (steps + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + 8
    even, odd = tl.split(tl.reshape(codes, [x.shape[0], x.shape[1] // 2, 2]))
    return (even | (odd << 4)).to(tl.uint8), ((bits >> 16) & 0xFFFF) | zero_bits


@jit
def scale_and_zero(words: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the scale and the zero, fp32, in each word of int4 scales."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -0x10000).to(tl.float32, bitcast=True)


@jit
def from_nibbles(pair: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Convert bytes of int4 codes to the first and the second number of each, without scale and zero, exactly.

    1024 + n in fp16 has n in its last bits.
    """
    bits = pair.to(tl.int16)
    first = ((bits & 15) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032.0
    second = (((bits >> 4) & 15) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032.0
    if dtype != tl.float16:
        first, second = first.to(tl.float32).to(dtype), second.to(tl.float32).to(dtype)
    return first, second


@jit
def nibbles_in_columns(pairs: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Convert bytes (N, E) of int4 codes to numbers (N, 2 E); see from_nibbles."""
    return tl.reshape(tl.join(*from_nibbles(pairs, dtype)), [pairs.shape[0], 2 * pairs.shape[1]])


@jit
def nibbles_in_rows(pairs: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Convert bytes (E, N) of int4 codes to numbers (2 E, N)."""
    numbers = tl.permute(tl.join(*from_nibbles(pairs, dtype)), 0, 2, 1)
    return tl.reshape(numbers, [2 * pairs.shape[0], pairs.shape[1]])


@jit
def _divide(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Compute x / scale to nearest, for a row's scale with an 8-bit mantissa.

    A first quotient with the rounded inverse is corrected by two fused operations (Markstein 1990, "Computation of
    elementary functions on the IBM RISC System/6000"). They are not fused in the interpreter.
    """
    if _FUSES:
        inverse = tl.div_rn(1.0, scale)
        quotient = x * inverse
        rest = tl.fma(-quotient, scale, x)
        # The remainder of an infinite number is NaN.
        quotient = tl.where(rest == rest, tl.fma(rest, inverse, quotient), quotient)
    else:
        quotient = tl.div_rn(x, scale)
    return quotient


@jit
def to_int8(x: tl.tensor) -> tl.tensor:
    """Convert fp32 within +-127 to int8, to nearest, ties to even; NaN becomes 0.

    Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    """
    whole = (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(x == x, whole, 0).to(tl.int8)


@jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """Convert fp32 within +-448 to e4m3 bits, to nearest, ties to even; NaN stays NaN.

    Implemented by hand, because Triton's interpreter rounds 31.19 to 16, and the type needs compute capability 8.9.
    """
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6: multiples of 2^-9.
    tiny = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, tiny, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@jit
def from_code(code: tl.tensor, dtype: tl.constexpr, NATIVE: tl.constexpr) -> tl.tensor:
    """Convert codes to `dtype`, exactly. NATIVE: see has_fp8_casts; without it e4m3's NaN becomes 480, as in _widen.

    Goes through fp16, to which the device converts two codes at a time; the fastest way from there to bf16 is fp32.
    """
    if code.dtype == tl.int8:
        half = _half_of_int8(code.to(tl.uint8, bitcast=True).to(tl.int16))
    elif NATIVE:
        half = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        half = _half_of_e4m3(code.to(tl.int16))
    return half if dtype == tl.float16 else half.to(tl.float32).to(dtype)


@jit
def from_codes(
    pair: tl.tensor, IS_INT8: tl.constexpr, dtype: tl.constexpr, NATIVE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Convert pairs of adjacent codes, given as int16, to the first and the second of each; see from_code."""
    first, second = pair & 0xFF, (pair >> 8) & 0xFF
    if IS_INT8:
        first, second = _half_of_int8(first), _half_of_int8(second)
    elif NATIVE:
        first = first.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = second.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        first, second = _half_of_e4m3(first), _half_of_e4m3(second)
    if dtype != tl.float16:
        first, second = first.to(tl.float32).to(dtype), second.to(tl.float32).to(dtype)
    return first, second


@jit
def _half_of_int8(bits: tl.tensor) -> tl.tensor:
    """Convert int8 bits in int16 to fp16: 1024 + 128 + n in fp16 has n + 128 in its last bits."""
    return ((bits ^ 0x80) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1152.0


@jit
def _half_of_e4m3(bits: tl.tensor) -> tl.tensor:
    """Convert e4m3 bits in int16 to fp16, where they form a number with an exponent that is 8 too small.

    s eeee mmm  ->  s 0eeeemmm 0000000
    """
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
