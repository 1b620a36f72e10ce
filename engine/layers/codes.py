"""Codes, scales and panels of quantized matrices in the formats of the CPU kernels (engine/cpu/formats.h)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu.structs import FormatName
from engine.weights.quantized_weight import E2M1_LEVELS, GGMLWeight, GroupedWeight, QuantizedWeight, unpack_4_bits

# O outputs, I inputs, G groups of inputs, N spans (inputs that share one header), U units of 32 inputs per span,
# R numbers of one kind in a header, C code columns: inputs in the order of the codes, P panels of 16 outputs,
# B bytes per span

_UNIT = 32
# Inputs per header and per scale, in descending order.
_SIZES = (128, 64, 32, 16)
# Largest integer of a table of levels.
_MOST_LEVEL = 8191
_E2M1 = torch.tensor(E2M1_LEVELS)
_PANEL = 16
# Codes per chunk; bounds the memory that packing needs beside the matrix.
_PACKED_AT_ONCE = 1 << 22
_FLOATS = (FormatName.FP8, FormatName.MXFP8)


@dataclass(frozen=True)
class Format:
    """Format of formats.h with its parameters. Matrices with equal ones can be packed as one.

    span, group: inputs per header and per scale. order: int32 input of each code column, -1 for padding; empty: in
    order. levels: for LEVELS, the lower bytes of its 16 numbers, then the upper ones; otherwise empty.
    """

    name: FormatName
    span: int = 256
    group: int = 32
    order: bytes = b""
    levels: bytes = b""

    @property
    def order_C(self) -> Tensor | None:
        return torch.frombuffer(bytearray(self.order), dtype=torch.int32) if self.order else None


@dataclass(frozen=True)
class Codes:
    """Rows of a matrix in a format of formats.h.

    codes_ONU32: uint8 with `bits` significant bits. heads: the header's numbers in its order, each
    (O, N, R, bytes of one number) uint8.
    """

    bits: int
    codes_ONU32: Tensor
    heads: tuple[Tensor, ...]


def format_of(weight: QuantizedWeight) -> Format | None:
    """Return the format that holds this matrix; None if there is none."""
    if isinstance(weight, GGMLWeight):
        if weight.kind.name not in _READERS:
            return None
        span = _span(weight.shape[1]) if weight.kind.block == 32 else 256
        return Format(FormatName[weight.kind.name], span=span)
    return _group_format(weight) if isinstance(weight, GroupedWeight) else None


def rows_of(weight: QuantizedWeight, form: Format, start: int, end: int) -> Codes:
    """Return rows [start, end) of a matrix in its format."""
    if isinstance(weight, GroupedWeight):
        return _groups(weight, form, start, end)
    assert isinstance(weight, GGMLWeight)
    codes, num_spans = codes_of(weight, start, end), weight.shape[1] // form.span
    heads = tuple(head.reshape(end - start, num_spans, -1, head.shape[-1]) for head in codes.heads)
    return Codes(codes.bits, codes.codes_ONU32.reshape(end - start, num_spans, -1, _UNIT), heads)


def factors_of(weight: QuantizedWeight, form: Format) -> Tensor | None:
    """Return the factor of each output, (O,) fp32, that the format's codes and scales leave out; None: 1."""
    if not isinstance(weight, GroupedWeight):
        return None
    # The kernels read E2M1 codes as twice their numbers, and e4m3 scales as 2^-8 times theirs.
    unit = {FormatName.NVFP4: 2.0**7, FormatName.MXFP4: 0.5}.get(form.name, 1.0)
    if form.name is FormatName.LEVELS:
        assert weight.levels is not None
        unit = 1 / _integer_levels(weight.levels)[1]
    if weight.factors_O is not None:
        return weight.factors_O.float() * unit
    return None if unit == 1 else torch.full((weight.shape[0],), unit)


def codes_of(weight: GGMLWeight, start: int, end: int) -> Codes:
    """Return rows [start, end) of a GGUF matrix that has a format, with a span per block."""
    blocks_ONB = torch.unflatten(weight.blocks_OB[start:end], 1, (-1, weight.kind.num_bytes))
    return _READERS[weight.kind.name](blocks_ONB)


# ---- GGUF: blocks of 32 inputs. A half-precision scale, a minimum (Q4_1, Q5_1), fifth bits, nibbles ----


def _block_of_32(blocks_ONB: Tensor, *, has_least: bool, has_fifth: bool) -> Codes:
    num_head = 4 if has_least else 2
    codes = _halves(blocks_ONB[..., -16:])
    if has_fifth:
        codes = codes | _bits(blocks_ONB[..., num_head : num_head + 4]) << 4
    heads = tuple(_number(blocks_ONB, at, 2) for at in range(0, num_head, 2))
    return Codes(5 if has_fifth else 4, codes.unsqueeze(2), heads)


def _q8_0(blocks_ONB: Tensor) -> Codes:
    return Codes(8, (blocks_ONB[..., 2:] ^ 128).unsqueeze(2), (_number(blocks_ONB, 0, 2),))


# ---- GGUF: blocks of 256 inputs (K) ----


def _nested(blocks_ONB: Tensor, *, has_fifth: bool) -> Codes:
    """Read Q4_K or Q5_K: d, dmin, eight 6-bit scales and eight 6-bit minimums in 12 bytes, fifth bits, nibbles."""
    packed = torch.unflatten(blocks_ONB[..., 4:16], -1, (3, 4))
    first, second, rest = packed.unbind(-2)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=-1)
    leasts = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=-1)
    codes = _halves(torch.unflatten(blocks_ONB[..., -128:], -1, (4, 32))).view(*blocks_ONB.shape[:2], 8, _UNIT)
    if has_fifth:
        run = torch.arange(8, dtype=torch.uint8, device=blocks_ONB.device).view(8, 1)
        codes = codes | (blocks_ONB[..., None, 16:48] >> run & 1) << 4
    heads = (_number(blocks_ONB, 0, 2), _number(blocks_ONB, 2, 2), scales.unsqueeze(-1), leasts.unsqueeze(-1))
    return Codes(5 if has_fifth else 4, codes, heads)


def _q6_k(blocks_ONB: Tensor) -> Codes:
    """Read Q6_K: two halves of 128 inputs with low 4 bits and upper 2 bits each; then 16 signed scales, and d."""
    low = torch.unflatten(blocks_ONB[..., :128], -1, (2, 2, 32))
    upper = torch.unflatten(blocks_ONB[..., 128:192], -1, (2, 1, 32))
    quarter = torch.arange(4, dtype=torch.uint8, device=blocks_ONB.device).view(4, 1)
    codes = torch.cat((low & 15, low >> 4), dim=-2) | (upper >> 2 * quarter & 3) << 4
    scales = blocks_ONB[..., 192:208].unsqueeze(-1)
    return Codes(6, codes.flatten(2, 3), (_number(blocks_ONB, 208, 2), scales))


_READERS: dict[str, Callable[[Tensor], Codes]] = {
    "Q4_0": lambda blocks: _block_of_32(blocks, has_least=False, has_fifth=False),
    "Q4_1": lambda blocks: _block_of_32(blocks, has_least=True, has_fifth=False),
    "Q5_0": lambda blocks: _block_of_32(blocks, has_least=False, has_fifth=True),
    "Q5_1": lambda blocks: _block_of_32(blocks, has_least=True, has_fifth=True),
    "Q8_0": _q8_0,
    "Q4_K": lambda blocks: _nested(blocks, has_fifth=False),
    "Q5_K": lambda blocks: _nested(blocks, has_fifth=True),
    "Q6_K": _q6_k,
}


def _halves(nibbles: Tensor) -> Tensor:
    """Return all low nibbles of the last dimension, then all high ones."""
    return torch.cat((nibbles & 15, nibbles >> 4), dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """Unpack (…, bytes) to (…, 8 bytes), lowest bit first."""
    return (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).flatten(-2)


def _number(blocks_ONB: Tensor, at: int, num_bytes: int) -> Tensor:
    return blocks_ONB[..., None, at : at + num_bytes]


# ---- scales per group of inputs ----


def _group_format(weight: GroupedWeight) -> Format | None:
    """Return the format that holds codes, scales and zeros exactly (levels: in 14 bits); None if there is none."""
    name = _name(weight)
    least = _SIZES[-1] if name is FormatName.NVFP4 else _UNIT
    if name is None or not len(weight.group_I):
        return None
    group_I, order_C = weight.group_I, None
    if not (group := _group_size(group_I, least)):
        # Groups are in any order (act-order), or not whole runs: sort and pad their inputs.
        order_C = _sorted(group_I, least)
        # Padding belongs to the group before it.
        filled_C = torch.where(order_C < 0, 0, torch.arange(len(order_C))).cummax(dim=0).values
        group = _group_size(group_I[order_C[filled_C]], least)
    levels = b""
    if name is FormatName.LEVELS:
        assert weight.levels is not None
        numbers = _integer_levels(weight.levels)[0].to(torch.int16)
        levels = numbers.view(torch.uint8).view(-1, 2).T.contiguous().numpy().tobytes()
    order = b"" if order_C is None else order_C.int().numpy().tobytes()
    return Format(name, _span(len(group_I) if order_C is None else len(order_C)), group, order, levels)


def _name(weight: GroupedWeight) -> FormatName | None:
    if weight.codes.dtype == torch.float8_e4m3fn:
        has_nan = bool((weight.codes.view(torch.uint8) & 127 == 127).any())
        is_plain = weight.zeros_OG is None and weight.levels is None and not has_nan
        return (FormatName.MXFP8 if _is_exact(weight, torch.float8_e8m0fnu) else FormatName.FP8) if is_plain else None
    if weight.levels is not None:
        if weight.zeros_OG is not None:
            return None
        if torch.equal(weight.levels.float(), _E2M1):
            for name, dtype in ((FormatName.MXFP4, torch.float8_e8m0fnu), (FormatName.NVFP4, torch.float8_e4m3fn)):
                if _is_exact(weight, dtype) and (name is FormatName.NVFP4 or _group_size(weight.group_I, _UNIT)):
                    return name
        return FormatName.LEVELS
    return _integer_name(weight)


def _integer_name(weight: GroupedWeight) -> FormatName | None:
    zeros_OG, bits = _zero_codes(weight), _bits_of(weight)
    if not torch.equal(zeros_OG.clamp(0, 255).to(torch.uint8).float(), zeros_OG):
        return None
    is_half = _is_exact(weight, torch.float16)
    if is_half and bool((zeros_OG == (8 if bits == 4 else 128)).all()):
        return FormatName.Q4_0 if bits == 4 else FormatName.Q8_0
    if bits == 4:
        return FormatName.INT4 if is_half else FormatName.INT4_F32
    return FormatName.INT8 if is_half else FormatName.INT8_F32


def _bits_of(weight: GroupedWeight) -> int:
    is_packed = weight.codes.shape[1] != weight.shape[1]
    return 4 if is_packed or (weight.codes.dtype == torch.uint8 and int(weight.codes.max()) < 16) else 8


def _zero_codes(weight: GroupedWeight) -> Tensor:
    """Return the code of zero per group, for unsigned codes: (O, G) fp32."""
    zeros_OG = torch.zeros(weight.scales_OG.shape) if weight.zeros_OG is None else weight.zeros_OG.float()
    return zeros_OG + 128 if weight.codes.dtype == torch.int8 else zeros_OG


def _is_exact(weight: GroupedWeight, dtype: torch.dtype) -> bool:
    scales_OG = weight.scales_OG.float()
    return torch.equal(scales_OG.to(dtype).float(), scales_OG)


def _integer_levels(levels: Tensor) -> tuple[Tensor, float]:
    """Return levels times the factor that leaves the least error, rounded to at most _MOST_LEVEL; and the factor."""
    most = float(levels.abs().max().clamp_min(1e-30))
    factors_F = torch.arange(_MOST_LEVEL, _MOST_LEVEL // 2, -1, dtype=torch.float64) / most
    products = levels.double() * factors_F.unsqueeze(1)
    best = int((products - products.round()).abs().amax(dim=1).argmin())
    return products[best].round().int(), float(factors_F[best])


def _group_size(group_I: Tensor, least: int) -> int:
    """Return the largest size that divides all groups, each of consecutive inputs; 0 if none fits."""
    borders = F.pad((group_I.diff() != 0).nonzero().flatten() + 1, (0, 1), value=len(group_I))
    fitting = (size for size in _SIZES if size >= least and not bool((borders % size).any()))
    return next(fitting, 0) if len(group_I) % _UNIT == 0 else 0


def _sorted(group_I: Tensor, least: int) -> Tensor:
    """Return the inputs in the order of their groups, each padded to whole runs with -1."""
    parts = torch.split(group_I.argsort(stable=True), group_I.bincount().tolist())
    order_C = torch.cat([F.pad(part, (0, -len(part) % least), value=-1) for part in parts])
    return F.pad(order_C, (0, -len(order_C) % _UNIT), value=-1)


def _span(num_columns: int) -> int:
    return next(size for size in _SIZES if num_columns % size == 0)


def _groups(weight: GroupedWeight, form: Format, start: int, end: int) -> Codes:
    order_C, num_outputs = form.order_C, end - start
    codes_OC = weight.codes[start:end]
    if codes_OC.shape[1] != weight.shape[1]:
        codes_OC = unpack_4_bits(codes_OC, weight.shape[1])
    codes_OC = codes_OC.view(torch.uint8)
    if weight.codes.dtype == torch.int8:
        codes_OC = codes_OC ^ 128
    group_G = weight.group_I[:: form.group]
    if order_C is not None:
        codes_OC = F.pad(codes_OC, (0, 1))[:, order_C.long()]
        group_G = weight.group_I[order_C[:: form.group].long()]
    dtype = _SCALES.get(form.name, torch.float16)
    heads = [weight.scales_OG[start:end, group_G].float().to(dtype).view(torch.uint8)]
    if form.name.name.startswith("INT"):
        heads.append(_zero_codes(weight)[start:end, group_G].to(torch.uint8))
    num_spans = codes_OC.shape[1] // form.span
    bits = 8 if weight.codes.dtype == torch.float8_e4m3fn else 4 if weight.levels is not None else _bits_of(weight)
    return Codes(
        bits,
        codes_OC.reshape(num_outputs, num_spans, -1, _UNIT),
        tuple(head.view(num_outputs, num_spans, form.span // form.group, -1) for head in heads),
    )


_SCALES = {
    FormatName.INT4_F32: torch.float32,
    FormatName.INT8_F32: torch.float32,
    FormatName.LEVELS: torch.float32,
    FormatName.FP8: torch.float32,
    FormatName.NVFP4: torch.float8_e4m3fn,
    FormatName.MXFP4: torch.float8_e8m0fnu,
    FormatName.MXFP8: torch.float8_e8m0fnu,
}


# ---- panels of 16 outputs, in the order of formats.h; codes are unchanged ----


def pack(weights: Sequence[QuantizedWeight], form: Format) -> Tensor:
    """Pack the rows of several weights of equal width and this format as one matrix: (P, N, B) uint8."""
    num_outputs, num_inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    step = max(1, _PACKED_AT_ONCE // num_inputs // _PANEL) * _PANEL
    packed = None
    for start in range(0, num_outputs, step):
        rows = _panels(_rows(weights, form, start, min(start + step, num_outputs)), is_float=form.name in _FLOATS)
        if packed is None:
            packed = torch.empty(-(-num_outputs // _PANEL), *rows.shape[1:], dtype=torch.uint8)
        packed[start // _PANEL :][: len(rows)] = rows
    assert packed is not None
    return packed


def _rows(weights: Sequence[QuantizedWeight], form: Format, start: int, end: int) -> Codes:
    """Return rows [start, end) of the concatenated weights."""
    parts, first = [], 0
    for weight in weights:
        low, high = max(start, first), min(end, first + weight.shape[0])
        if low < high:
            parts.append(rows_of(weight, form, low - first, high - first))
        first += weight.shape[0]
    heads = zip(*(part.heads for part in parts), strict=True)
    codes = torch.cat([part.codes_ONU32 for part in parts])
    return Codes(parts[0].bits, codes, tuple(torch.cat(head) for head in heads))


def _panels(rows: Codes, *, is_float: bool) -> Tensor:
    """Arrange rows in panels: (P, N, B)."""
    codes_PNU864 = _by_panel(torch.unflatten(rows.codes_ONU32, -1, (8, 4)))
    if is_float:
        # Of each four outputs, the first two inputs precede the other two.
        codes_PNU864 = torch.unflatten(codes_PNU864, -1, (4, 4, 2, 2)).transpose(-3, -2).flatten(-4)
    codes = torch.cat([part.flatten(3) for part in _planes(codes_PNU864, rows.bits)], dim=-1)
    return torch.cat([*(_by_panel(head).flatten(2) for head in rows.heads), codes.flatten(2)], dim=-1)


def _by_panel(values: Tensor) -> Tensor:
    """Interleave rows of each panel, padded with zeros: (O, …, C) -> (P, …, 16 C)."""
    padded = F.pad(values, (0, 0) * (values.dim() - 1) + (0, -len(values) % _PANEL))
    return torch.unflatten(padded, 0, (-1, _PANEL)).movedim(1, -2).flatten(-2)


def _planes(codes_PNU864: Tensor, bits: int) -> list[Tensor]:
    """Return the bit planes of a unit's codes, as defined in formats.h."""
    if bits == 8:
        return [codes_PNU864]
    even, odd = (codes_PNU864[..., first::2, :] & 15 for first in (0, 1))
    planes = [even | odd << 4]
    if bits > 4:
        # Number of codes whose upper bits fill a byte.
        groups = 8 // (bits - 4)
        shift = torch.arange(groups, dtype=torch.uint8).view(groups, 1) * (bits - 4)
        upper = torch.unflatten(codes_PNU864 >> 4, -2, (-1, groups)) << shift
        planes.append(upper.sum(dim=-2, dtype=torch.uint8))
    return planes
