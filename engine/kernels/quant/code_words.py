"""Low-bit codes in 16-bit words, and their exact conversion to floats in registers.

A word holds codes of inputs that lie apart, so that one position of two adjacent words forms a bf16 pair without
shuffles (in PTX; elsewhere with plain operations, in any dtype):

    nibbles       0 1000011 0 000 qqqq  is the bf16 128 + q; subtract 128 and the zero code
    int8          the same with 7 bits, and with the sign bit selecting 128 or 256 as the offset to subtract
    e4m3          s 0000eeee mmm 0000, whose exponent is 120 too small, times 2^120
    e2m1          s 000000ee m 000000, whose exponent is 126 too small, times 2^126
    levels        a byte permutation finds the two bytes of each number in a table of 16
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

from engine.kernels.language import jit, tl

# Kinds of codes. e4m3 and int8 are two per word, the low byte first; others four per word, the low 4 bits of each.
# LEVELS: each 4-bit code stands for one of 16 given numbers. The upper bits of 5- and 6-bit codes are in a second word
# shared by four (6 bits: two) units: unit u, position p at bit (4 u + p) * (bits - 4).
E4M3, INT8, E2M1, LEVELS, NIBBLES, FIVE_BITS, SIX_BITS = range(7)


@cache
def table_of(levels: tuple[float, ...]) -> tuple[int, ...]:
    """Return the levels in bf16 as eight 32-bit words: the low bytes of all 16, then the high bytes."""
    wide = struct.unpack("<16I", struct.pack("<16f", *levels))
    halves = [number + 0x7FFF + (number >> 16 & 1) >> 16 for number in wide]
    return struct.unpack("<8i", bytes(half & 255 for half in halves) + bytes(half >> 8 for half in halves))


@jit
def widen(
    word: tl.tensor,
    high: tl.tensor,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    LEVELS: tl.constexpr,
    dtype: tl.constexpr,
    NATIVE: tl.constexpr,
) -> Any:
    """Convert words (O, K) int16 to one tile (O, K) of `dtype` for each position, two or four of them.

    high: upper bits of 5- and 6-bit codes; UNIT: selects the unit's bits. LEVELS: the 16 numbers, or with NATIVE their
    `table_of`; rounded to dtype. Unsigned codes are centered. NATIVE: use PTX, on a GPU with bf16. e4m3's NaN becomes
    480.
    """
    if NATIVE:
        if KIND == 0:
            return _e4m3_pairs(word)
        elif KIND == 1:
            return _int8_pairs(word)
        elif KIND == 2:
            return _e2m1_pairs(word)
        elif KIND == 3:
            return _level_pairs(word, LEVELS)
        elif KIND == 4:
            return _nibble_pairs(word)
        else:
            return _high_pairs(word, high, UNIT, KIND)
    else:
        if KIND < 2:
            return _byte(word, 0, KIND, dtype), _byte(word, 8, KIND, dtype)
        else:
            return (
                _code(word, high, 0, UNIT, KIND, LEVELS, dtype),
                _code(word, high, 1, UNIT, KIND, LEVELS, dtype),
                _code(word, high, 2, UNIT, KIND, LEVELS, dtype),
                _code(word, high, 3, UNIT, KIND, LEVELS, dtype),
            )


# Formats of numbers in one byte; 0: none.
UINT8_BYTE, INT8_BYTE, E4M3_BYTE, E8M0_BYTE = range(1, 5)


@jit
def number_of_byte(word: tl.tensor, PLACE: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """Convert one byte of 16- or 32-bit words to fp32, exactly. The NaN of e8m0 becomes infinity, and e4m3's 480.

    Integers are placed in the low bits of 2^23, which is then subtracted.
    """
    if FORMAT == 3:
        return _byte(word, 8 * PLACE, 0, tl.float32)
    byte = (word.to(tl.int32) >> (8 * PLACE)) & 255
    if FORMAT == 4:
        # 2^-127 has no exponent bits.
        return tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)
    if FORMAT == 2:
        return ((byte ^ 128) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    return (byte | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@jit
def times(code: tl.tensor, scale: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Multiply codes (O, K) by their outputs' scales (O,), rounded to the dtype of the codes."""
    factor = tl.broadcast_to(scale.to(code.dtype)[:, None], code.shape)
    return _times_pairs(code, factor) if NATIVE else code * factor


@jit
def _byte(word: tl.tensor, SHIFT: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    # Sign-extended.
    byte = (word.to(tl.int32) << (24 - SHIFT)) >> 24
    if KIND == 1:
        return byte.to(tl.float32).to(dtype)
    return (((byte << 20) & -0x78100000).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120


@jit
def _code(
    word: tl.tensor,
    high: tl.tensor,
    P: tl.constexpr,
    UNIT: tl.constexpr,
    KIND: tl.constexpr,
    LEVELS: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    code = (word.to(tl.int32) >> (4 * P)) & 15
    if KIND == 2:
        bits = ((code << 28) & -0x80000000) | ((code << 22) & 0x01C00000)
        return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(dtype)  # 2^126
    if KIND == 3:
        number = tl.full(code.shape, LEVELS[0], tl.float32)
        for i in tl.static_range(1, 16):
            number = tl.where(code == i, LEVELS[i], number)
        return number.to(dtype)
    if KIND > 4:
        code |= ((high.to(tl.int32) >> ((4 * UNIT + P) * (KIND - 4))) & (KIND * 2 - 9)) << 4
    return (code - (1 << (KIND - 1))).to(tl.float32).to(dtype)


# The same in PTX on pairs of words: the codes at one position form one register of two bf16.


@jit
def _e4m3_pairs(word: tl.tensor) -> Any:
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sign, size, scale, none;
        mov.b32 scale, 0x7B807B80;
        mov.b32 none, 0x80008000;
        shl.b32 sign, $2, 8;
        shl.b32 size, $2, 4;
        and.b32 size, size, 0x07F007F0;
        lop3.b32 size, sign, none, size, 0xEA;
        fma.rn.bf16x2 $0, size, scale, none;
        shr.b32 size, $2, 4;
        and.b32 size, size, 0x07F007F0;
        lop3.b32 size, $2, none, size, 0xEA;
        fma.rn.bf16x2 $1, size, scale, none;
        }""",
        "=r,=r,r",
        [word],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@jit
def _int8_pairs(word: tl.tensor) -> Any:
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 size, sign, seven, top, plus, minus, one, other;
        mov.b32 seven, 0x007F007F;
        mov.b32 top, 0x00800080;
        mov.b32 plus, 0x43004300;
        mov.b32 minus, 0xC300C300;
        mov.b32 one, 0x3F803F80;
        lop3.b32 size, $2, seven, plus, 0xEA;
        lop3.b32 sign, $2, top, minus, 0xEA;
        fma.rn.bf16x2 $0, size, one, sign;
        shr.b32 other, $2, 8;
        lop3.b32 size, other, seven, plus, 0xEA;
        lop3.b32 sign, other, top, minus, 0xEA;
        fma.rn.bf16x2 $1, size, one, sign;
        }""",
        "=r,=r,r",
        [word],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@jit
def _e2m1_pairs(word: tl.tensor) -> Any:
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 sign, size, scale, none;
        mov.b32 scale, 0x7E807E80;
        mov.b32 none, 0x80008000;
        shl.b32 sign, $4, 12;
        shl.b32 size, $4, 6;
        and.b32 size, size, 0x01C001C0;
        lop3.b32 size, sign, none, size, 0xEA;
        fma.rn.bf16x2 $0, size, scale, none;
        shl.b32 sign, $4, 8;
        shl.b32 size, $4, 2;
        and.b32 size, size, 0x01C001C0;
        lop3.b32 size, sign, none, size, 0xEA;
        fma.rn.bf16x2 $1, size, scale, none;
        shl.b32 sign, $4, 4;
        shr.b32 size, $4, 2;
        and.b32 size, size, 0x01C001C0;
        lop3.b32 size, sign, none, size, 0xEA;
        fma.rn.bf16x2 $2, size, scale, none;
        shr.b32 size, $4, 6;
        and.b32 size, size, 0x01C001C0;
        lop3.b32 size, $4, none, size, 0xEA;
        fma.rn.bf16x2 $3, size, scale, none;
        }""",
        "=r,=r,=r,=r,r",
        [word],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@jit
def _level_pairs(word: tl.tensor, TABLE: tl.constexpr) -> Any:
    """Look up low and high bytes, each in the lower and in the upper half of the table.

    A byte permutation takes the lower three bits of four codes. Their upper bits become bytes of ones, which select a
    half: the permutation repeats a byte's sign if the selector's upper bit is set.
    """
    A: tl.constexpr = TABLE[0]
    B: tl.constexpr = TABLE[1]
    C: tl.constexpr = TABLE[2]
    D: tl.constexpr = TABLE[3]
    E: tl.constexpr = TABLE[4]
    F: tl.constexpr = TABLE[5]
    G: tl.constexpr = TABLE[6]
    H: tl.constexpr = TABLE[7]
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 a, b, c, d, e, f, g, h, code, upper, bits, ones, low, high, other, next, first, second;
        mov.b32 a, {A};
        mov.b32 b, {B};
        mov.b32 c, {C};
        mov.b32 d, {D};
        mov.b32 e, {E};
        mov.b32 f, {F};
        mov.b32 g, {G};
        mov.b32 h, {H};
        mov.b32 bits, 0x80008000;
        and.b32 code, $4, 0x77777777;
        shr.b32 upper, $4, 3;
        lop3.b32 upper, $4, upper, 0x88888888, 0xE4;
        prmt.b32 ones, bits, bits, upper;
        prmt.b32 low, a, b, code;
        prmt.b32 other, c, d, code;
        lop3.b32 low, other, low, ones, 0xE4;
        prmt.b32 high, e, f, code;
        prmt.b32 other, g, h, code;
        lop3.b32 high, other, high, ones, 0xE4;
        shr.b32 code, code, 16;
        shr.b32 upper, upper, 16;
        prmt.b32 ones, bits, bits, upper;
        prmt.b32 next, a, b, code;
        prmt.b32 other, c, d, code;
        lop3.b32 next, other, next, ones, 0xE4;
        prmt.b32 first, low, next, 0x5140;
        prmt.b32 second, low, next, 0x7362;
        prmt.b32 next, e, f, code;
        prmt.b32 other, g, h, code;
        lop3.b32 next, other, next, ones, 0xE4;
        prmt.b32 low, high, next, 0x5140;
        prmt.b32 high, high, next, 0x7362;
        prmt.b32 $0, first, low, 0x5140;
        prmt.b32 $1, first, low, 0x7362;
        prmt.b32 $2, second, high, 0x5140;
        prmt.b32 $3, second, high, 0x7362;
        }}""",
        "=r,=r,=r,=r,r",
        [word],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@jit
def _times_pairs(code: tl.tensor, factor: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 none;
        mov.b32 none, 0x80008000;
        fma.rn.bf16x2 $0, $1, $2, none;
        }""",
        "=r,r,r",
        [code, factor],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@jit
def _nibble_pairs(word: tl.tensor) -> Any:
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 code, four, plus, one, zero;
        mov.b32 four, 0x000F000F;
        mov.b32 plus, 0x43004300;
        mov.b32 one, 0x3F803F80;
        mov.b32 zero, 0xC308C308;
        lop3.b32 code, $4, four, plus, 0xEA;
        fma.rn.bf16x2 $0, code, one, zero;
        shr.b32 code, $4, 4;
        lop3.b32 code, code, four, plus, 0xEA;
        fma.rn.bf16x2 $1, code, one, zero;
        shr.b32 code, $4, 8;
        lop3.b32 code, code, four, plus, 0xEA;
        fma.rn.bf16x2 $2, code, one, zero;
        shr.b32 code, $4, 12;
        lop3.b32 code, code, four, plus, 0xEA;
        fma.rn.bf16x2 $3, code, one, zero;
        }""",
        "=r,=r,=r,=r,r",
        [word],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@jit
def _high_pairs(word: tl.tensor, high: tl.tensor, UNIT: tl.constexpr, KIND: tl.constexpr) -> Any:
    """Convert 5- and 6-bit codes. Upper bits are rotated to bit 4 first, by a compile-time amount."""
    BITS: tl.constexpr = KIND - 4
    # Rotation to the right.
    FIRST: tl.constexpr = (4 * UNIT * BITS - 4) & 31
    MASK: tl.constexpr = 0x00100010 if BITS == 1 else 0x00300030
    ZERO: tl.constexpr = 0xC310C310 if BITS == 1 else 0xC320C320
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 code, upper, four, mask, plus, one, zero;
        mov.b32 four, 0x000F000F;
        mov.b32 mask, {MASK};
        mov.b32 plus, 0x43004300;
        mov.b32 one, 0x3F803F80;
        mov.b32 zero, {ZERO};
        shf.r.wrap.b32 upper, $5, $5, {FIRST};
        lop3.b32 code, $4, four, plus, 0xEA;
        lop3.b32 code, upper, mask, code, 0xEA;
        fma.rn.bf16x2 $0, code, one, zero;
        shf.r.wrap.b32 upper, $5, $5, {(FIRST + BITS) & 31};
        shr.b32 code, $4, 4;
        lop3.b32 code, code, four, plus, 0xEA;
        lop3.b32 code, upper, mask, code, 0xEA;
        fma.rn.bf16x2 $1, code, one, zero;
        shf.r.wrap.b32 upper, $5, $5, {(FIRST + 2 * BITS) & 31};
        shr.b32 code, $4, 8;
        lop3.b32 code, code, four, plus, 0xEA;
        lop3.b32 code, upper, mask, code, 0xEA;
        fma.rn.bf16x2 $2, code, one, zero;
        shf.r.wrap.b32 upper, $5, $5, {(FIRST + 3 * BITS) & 31};
        shr.b32 code, $4, 12;
        lop3.b32 code, code, four, plus, 0xEA;
        lop3.b32 code, upper, mask, code, 0xEA;
        fma.rn.bf16x2 $3, code, one, zero;
        }}""",
        "=r,=r,=r,=r,r,r",
        [word, high],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
