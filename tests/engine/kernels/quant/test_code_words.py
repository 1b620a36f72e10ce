"""Conversion of every code, in PTX and without, to the numbers of its format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.language import jit, tl
from engine.kernels.quant.code_words import (
    E2M1,
    E4M3,
    E4M3_BYTE,
    E8M0_BYTE,
    FIVE_BITS,
    INT8,
    INT8_BYTE,
    LEVELS,
    NIBBLES,
    SIX_BITS,
    UINT8_BYTE,
    number_of_byte,
    table_of,
    times,
    widen,
)
from engine.weights.quantized_weight import E2M1_LEVELS
from tests.engine.kernels.interpreter import inline_ptx
from tests.engine.kernels.pools import DEVICE
from tests.support.grids import quick

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

# Distinct in every bit pattern, and exact in bf16.
ANY_LEVELS = tuple((-1.0) ** i * (1 + i / 64) * 2.0 ** (i - 7) for i in range(16))
_LEVELS = {E2M1: E2M1_LEVELS, LEVELS: ANY_LEVELS}


@jit
def _widen_words(
    words: tl.tensor,
    high: tl.tensor,
    out: tl.tensor,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    LEVELS: tl.constexpr,
    POSITIONS: tl.constexpr,
    dtype: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    place = tl.program_id(0) * 1024 + tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    codes = widen(tl.load(words + place), tl.load(high + place), UNIT, KIND, LEVELS, dtype, NATIVE)
    for p in tl.static_range(POSITIONS):
        tl.store(out + p * 65536 + place, codes[p])


@jit
def _number_words(words: tl.tensor, out: tl.tensor, FORMAT: tl.constexpr) -> None:
    place = tl.arange(0, 64)
    for byte in tl.static_range(4):
        tl.store(out + 4 * place + byte, number_of_byte(tl.load(words + place), byte, FORMAT))


@jit
def _scale_codes(codes: tl.tensor, scales: tl.tensor, out: tl.tensor, NATIVE: tl.constexpr) -> None:
    o, k = tl.arange(0, 16), tl.arange(0, 16)
    place = o[:, None] * 16 + k[None, :]
    tl.store(out + place, times(tl.load(codes + place), tl.load(scales + o), NATIVE))


def numbers_of_words(words: Tensor, high: Tensor, kind: int, unit: int) -> Tensor:
    """Return the numbers of each position, (positions, words) fp32."""
    if kind < E2M1:
        bytes_W2 = words.view(torch.uint8).view(-1, 2)
        return bytes_W2.view(torch.int8 if kind == INT8 else torch.float8_e4m3fn).float().T
    codes = torch.stack([words.int() >> 4 * p & 15 for p in range(4)])
    if kind in _LEVELS:
        return torch.tensor(_LEVELS[kind])[codes]
    bits = kind - 4
    for p in range(4):
        codes[p] |= (high.int() >> (4 * unit + p) * bits & (1 << bits) - 1) << 4
    return codes.float() - (1 << kind - 1)


@pytest.mark.parametrize("is_native", [False, True], ids=["plain", "ptx"])
@pytest.mark.parametrize(
    ("kind", "unit"),
    [
        *((E4M3, 0), (INT8, 0), (E2M1, 0), (LEVELS, 0), (NIBBLES, 0), (FIVE_BITS, 3), (SIX_BITS, 1)),
        *quick([*((FIVE_BITS, unit) for unit in range(3)), (SIX_BITS, 0)], ()),
    ],
)
def test_all_words_become_their_numbers(kind: int, unit: int, is_native: bool) -> None:
    words = torch.arange(-32768, 32768, device=DEVICE).to(torch.int16)
    # Unlike the words, and in every combination of upper bits.
    high = torch.roll(words * 7, 3)
    positions, dtype = 2 if kind < E2M1 else 4, torch.bfloat16 if is_native else torch.float32
    out = torch.empty(positions, 65536, dtype=dtype, device=DEVICE)
    levels = None if kind != LEVELS else table_of(ANY_LEVELS) if is_native else ANY_LEVELS
    with inline_ptx():
        _widen_words[(64,)](
            words,
            high,
            out,
            UNIT=unit,
            KIND=kind,
            LEVELS=levels,
            POSITIONS=positions,
            dtype=tl.bfloat16 if is_native else tl.float32,
            NATIVE=is_native,
        )
    expected = numbers_of_words(words.cpu(), high.cpu(), kind, unit).nan_to_num(480.0)
    got = out.float().cpu().copysign(expected) if kind == E4M3 else out.float().cpu()
    assert torch.equal(got, torch.where(expected.abs() == 480, expected.copysign(got), expected))


def test_levels_are_rounded_to_bf16() -> None:
    levels = torch.linspace(-1, 1, 16).tolist()
    table = torch.tensor(table_of(tuple(levels)), dtype=torch.int32).view(torch.uint8).view(2, 16)
    assert torch.equal(table.T.contiguous().view(torch.bfloat16).flatten(), torch.tensor(levels).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("format_of_byte", "dtype"),
    [
        (UINT8_BYTE, torch.uint8),
        (INT8_BYTE, torch.int8),
        (E4M3_BYTE, torch.float8_e4m3fn),
        (E8M0_BYTE, torch.float8_e8m0fnu),
    ],
)
def test_all_bytes_become_their_numbers(format_of_byte: int, dtype: torch.dtype) -> None:
    values = torch.arange(256, device=DEVICE).to(torch.uint8)
    out = torch.empty(256, device=DEVICE)
    _number_words[(1,)](values.view(torch.int32), out, FORMAT=format_of_byte)
    expected = values.view(dtype).float()
    is_number = ~expected.isnan()
    assert torch.equal(out[is_number], expected[is_number])
    assert (out[~is_number].abs() >= 480).all()


@pytest.mark.parametrize("is_native", [False, True], ids=["plain", "ptx"])
def test_scaled_codes_are_exact(is_native: bool) -> None:
    codes = torch.tensor(E2M1_LEVELS).repeat(16, 1).to(DEVICE)
    scales = torch.arange(0x38, 0x48, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).float()
    dtype = torch.bfloat16 if is_native else torch.float32
    out = torch.empty(16, 16, dtype=dtype, device=DEVICE)
    with inline_ptx():
        _scale_codes[(1,)](codes.to(dtype), scales, out, NATIVE=is_native)
    assert torch.equal(out.float(), codes * scales[:, None])
