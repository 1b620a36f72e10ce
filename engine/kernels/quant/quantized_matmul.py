"""Products with low-bit matrices: codes are read once and dequantized in registers.

    out[t, o] = residual[t, o] + (factor[o] * sum over groups g of (scale[o, g] * (code[o, g] . x[t, g])
                                                                    + least[o, g] * sum x[t, g]) + bias[o])

Codes are exact in the activations' dtype; only LEVELS are rounded to it. Scales multiply the fp32 sums of a group, or
the codes where that product is exact.

With few rows, one program per output tile would leave the device idle, so programs split the inputs: each writes its
partial sums, and the last one adds them up in order and resets its counter (split-K).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.kernels.language import (
    cdiv,
    has_tensor_memory,
    has_tile_copies,
    jit,
    power_of_2,
    reuses_tensor_memory,
    spares_registers,
    tl,
)
from engine.kernels.quant.code_panels import ROWS, RUN, CodePanels, as_words, span_of
from engine.kernels.quant.code_words import (
    E2M1,
    E4M3,
    E4M3_BYTE,
    E8M0_BYTE,
    FIVE_BITS,
    INT8_BYTE,
    LEVELS,
    NIBBLES,
    UINT8_BYTE,
    number_of_byte,
    table_of,
    times,
    widen,
)
from engine.kernels.quant.row_quantization import as_bytes

# T tokens, I input features, O output features, C experts per token

_PROGRAMS_PER_PROCESSOR = 4
_MOST_SPLITS = 16
_BYTE_FORMATS = {
    torch.uint8: UINT8_BYTE,
    torch.int8: INT8_BYTE,
    torch.float8_e4m3fn: E4M3_BYTE,
    torch.float8_e8m0fnu: E8M0_BYTE,
}


@dataclass(frozen=True)
class Tile:
    """Tile sizes and launch parameters of a program."""

    outputs: int
    rows: int
    num_warps: int
    num_stages: int
    # True if programs may split the inputs.
    is_split: bool

    @classmethod
    def of(cls, num_rows: int, panels: CodePanels, device: torch.device) -> Tile:
        kind = panels.kind
        if num_rows > 32 and _wants_few_rows(panels, device):
            return cls(128, 32, 8, 3, num_rows <= 64)
        if 32 < num_rows <= 64 and kind == FIVE_BITS and not has_tile_copies(device) and not spares_registers():
            # Older Triton spills registers with 64 rows and split inputs.
            return cls(128, 32, 8, 3, True)
        if num_rows <= 32:
            return cls(64, max(16, power_of_2(num_rows)), 4, 4 if kind < E2M1 else 3, True)
        if num_rows <= 64 and kind < E2M1:
            return cls(128, 64, 8, 3, True)
        if _has_large_tiles(panels):
            return cls(128, 128, 8, 3, False)
        # With the scales of three stages, only one program would fit a processor.
        return cls(64, 64, 4, 2 if kind == E2M1 and panels.group < 32 else 3, num_rows <= 64)


def new_counters(num_outputs: int, device: torch.device) -> Tensor:
    """Return the counters of one matrix's products, one per tile of outputs (at most two per panel) and of rows."""
    return torch.zeros(2 * cdiv(num_outputs, ROWS), dtype=torch.int32, device=device)


def launch_coded_product(
    x_TI: Tensor,
    panels: CodePanels,
    counters: Tensor,
    *,
    bias_O: Tensor | None = None,
    residual_TO: Tensor | None = None,
    out_TO: Tensor | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute residual + (x @ weight.T + bias), rounded to x's dtype before the residual is added: (T, O).

    counters: from `new_counters`, zero between launches. Two streams must not use them concurrently. out: may be
    columns of a wider tensor if residual has the same layout; None allocates it. tile, splits: for tests.
    """
    (num_outputs, num_inputs), num_rows = panels.shape, len(x_TI)
    x_TI = x_TI.contiguous()
    out_TO = x_TI.new_empty(num_rows, num_outputs) if out_TO is None else out_TO
    if not num_rows:
        return out_TO
    tile = tile or _fitted(Tile.of(num_rows, panels, x_TI.device), panels, x_TI)
    num_tiles = cdiv(num_outputs, tile.outputs), cdiv(num_rows, tile.rows)
    num_spans = panels.num_units // panels.units_of_a_span
    splits = splits or (splits_for(num_tiles[0] * num_tiles[1], num_spans, x_TI.device) if tile.is_split else 1)
    per_split = cdiv(num_spans, splits)
    splits = cdiv(num_spans, per_split)
    is_split = splits > 1
    parts = x_TI.new_empty(splits, num_rows, num_outputs, dtype=torch.float32) if is_split else out_TO
    assert not is_split or len(counters) >= num_tiles[0] * num_tiles[1]
    assert residual_TO is None or residual_TO.stride(1) == 1
    assert residual_TO is None or num_rows == 1 or residual_TO.stride(0) == out_TO.stride(0)
    _product[(*num_tiles, splits)](
        x_TI,
        *_pointers(panels),
        parts,
        counters,
        out_TO,
        bias_O,
        residual_TO,
        counters,
        counters,
        num_rows,
        0,
        num_outputs,
        out_TO.stride(0),
        num_inputs,
        panels.num_units,
        per_split,
        splits,
        IS_SPLIT=is_split,
        CHOICES=0,
        **_constants(panels, tile, x_TI),
    )
    return out_TO


def launch_expert_product(
    x_NI: Tensor,
    panels: CodePanels,
    choice_P: Tensor,
    expert_B: Tensor,
    num_choices: int,
    *,
    of_each: int,
    bias_XO: Tensor | None = None,
) -> Tensor:
    """Multiply each choice's row with its expert's matrix, and add the expert's bias: (choices, O).

    choice, expert: from expert_tiles.launch_sort_into_tiles. of_each: number of choices that share a row of x.
    """
    (num_outputs, num_inputs), num_experts = panels.shape, len(panels.words)
    out_NO = x_NI.new_empty(num_choices, num_outputs)
    rows = len(choice_P) // len(expert_B)
    tile = Tile.of(rows, panels, x_NI.device)
    tile = replace(tile, num_stages=min(tile.num_stages, 3))
    assert tile.rows == rows, f"tiles of {rows} choices exceed most_rows_of_experts"
    tile = _fitted(tile, panels, x_NI)
    _product[(cdiv(num_outputs, tile.outputs), len(expert_B), 1)](
        x_NI,
        *_pointers(panels),
        out_NO,
        expert_B,
        out_NO,
        bias_XO,
        None,
        choice_P,
        expert_B,
        num_choices,
        num_experts,
        num_outputs,
        num_outputs,
        num_inputs,
        panels.num_units,
        panels.num_units // panels.units_of_a_span,
        1,
        IS_SPLIT=False,
        CHOICES=of_each,
        **_constants(panels, tile, x_NI),
    )
    return out_NO


def most_rows_of_experts(panels: CodePanels, device: torch.device) -> int:
    """Return the maximum rows of a tile for `launch_expert_product`, the rows of `Tile.of`."""
    if _has_large_tiles(panels):
        return 128
    is_short_of_registers = not has_tile_copies(device) and not spares_registers()
    return 32 if is_short_of_registers or _wants_few_rows(panels, device) else 64


def launch_widen(panels: CodePanels, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Dequantize outputs [start, end): (end - start, I). start: a multiple of 64.

    dtype float8_e4m3fn: return the codes of an e4m3 matrix, with inputs padded with zeros to a multiple of 128.
    """
    is_raw = dtype == torch.float8_e4m3fn
    assert not is_raw or panels.kind == E4M3
    width = cdiv(panels.shape[1], span_of(E4M3)) * span_of(E4M3) if is_raw else panels.shape[1]
    out_OI = torch.empty(end - start, width, dtype=dtype, device=panels.words.device)
    constants = _constants(panels, Tile(ROWS, 16, 4, 1, False), out_OI)
    for name in ("BLOCK_T", "IN_PLACE", "FOLDS"):
        del constants[name]
    num_spans = panels.num_units // constants["SPAN"]
    _widen[(cdiv(end - start, ROWS), num_spans)](
        *_pointers(panels),
        as_bytes(out_OI),
        start // ROWS,
        end - start,
        width,
        panels.num_units,
        IS_RAW=is_raw,
        **constants,
    )
    return out_OI


def _has_large_tiles(panels: CodePanels) -> bool:
    """Return True if a tile of 128 rows fits the registers; zero points double the number of accumulators."""
    return panels.kind < E2M1 and panels.leasts is None


def _wants_few_rows(panels: CodePanels, device: torch.device) -> bool:
    """Return True if 64 rows would not fit: an A100's matrix operands are in registers."""
    return E2M1 <= panels.kind <= NIBBLES and panels.words.shape[-1] > 16 and not has_tile_copies(device)


def _folds(panels: CodePanels, dtype: torch.dtype) -> bool:
    """Return True if codes times scales are exact in the dtype, so that one product sums all groups.

    Codes have up to 4 significant bits and byte scales too; their exponents need more than fp16's range.
    """
    is_float = panels.kind in (E4M3, E2M1) and dtype != torch.float16
    return is_float and panels.scales is not None and panels.scales.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu)


def _fitted(tile: Tile, panels: CodePanels, x: Tensor) -> Tile:
    """Shrink the tile if its products do not fit tensor memory, where Triton keeps those of all groups of an iteration.

    Triton compiles a trap otherwise. Tiles of 32 outputs are multiplied without tensor memory, as on an A100.
    """
    if not panels.group or _folds(panels, x.dtype) or not has_tensor_memory(x.device):
        return tile
    inputs = panels.units_of_a_span * panels.num_positions * panels.words.shape[-1]
    places = inputs // panels.group if reuses_tensor_memory() else 2 * inputs // panels.words.shape[-1]
    return replace(tile, outputs=32) if places * tile.rows >= 512 else tile


def splits_for(num_tiles: int, num_spans: int, device: torch.device) -> int:
    """Return the number of programs that split a tile's inputs. On a CPU two, so that tests cover it."""
    if device.type != "cuda":
        return min(2, num_spans)
    target = torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_PROCESSOR
    return max(1, min(target // num_tiles, num_spans, _MOST_SPLITS))


def _pointers(panels: CodePanels) -> tuple[Tensor | None, ...]:
    """Return the panels' pointers in the order of the kernels' arguments."""
    rest = (panels.high, panels.scales, panels.leasts, panels.supers, panels.super_leasts, panels.factors)
    return panels.words, *(None if tensor is None else as_words(tensor) for tensor in rest)


def _constants(panels: CodePanels, tile: Tile, x: Tensor) -> dict[str, Any]:
    least = 0
    if panels.leasts is not None:
        least = 1 if panels.leasts.dtype != torch.uint8 else 2 if panels.supers is None else 3
    is_native = x.dtype == torch.bfloat16 and x.is_cuda
    levels = panels.levels if panels.kind == LEVELS else None
    return {
        "KIND": panels.kind,
        "LEVELS": table_of(levels) if levels and is_native else levels,
        "GROUP": panels.group,
        "LEAST": least,
        "IS_NESTED": panels.supers is not None,
        "FORMAT": 0 if panels.scales is None else _BYTE_FORMATS.get(panels.scales.dtype, 0),
        "FOLDS": _folds(panels, x.dtype),
        "K": panels.words.shape[-1],
        "SPAN": panels.units_of_a_span,
        "IS_EVEN": panels.shape[1] % RUN == 0,
        "NATIVE": is_native,
        "IN_PLACE": (panels.group == 0 or _folds(panels, x.dtype)) and not has_tile_copies(x.device),
        "BLOCK_O": tile.outputs,
        "BLOCK_T": tile.rows,
        "num_warps": tile.num_warps,
        # fp32 rows need twice the memory.
        "num_stages": min(tile.num_stages, 2) if x.element_size() == 4 else tile.num_stages,
    }


@partial(jit, do_not_specialize=["num_rows", "num_experts", "spans_per_split", "splits"])
def _product(
    x: tl.tensor,
    words: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    leasts: tl.tensor,
    supers: tl.tensor,
    super_leasts: tl.tensor,
    factors: tl.tensor,
    parts: tl.tensor,
    counters: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    choices: tl.tensor,
    experts: tl.tensor,
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    num_outputs: tl.tensor,
    out_stride: tl.tensor,
    num_inputs: tl.tensor,
    num_units: tl.tensor,
    spans_per_split: tl.tensor,
    splits: tl.tensor,
    KIND: tl.constexpr,
    LEVELS: tl.constexpr,
    GROUP: tl.constexpr,
    LEAST: tl.constexpr,
    IS_NESTED: tl.constexpr,
    FORMAT: tl.constexpr,
    FOLDS: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    IS_EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    CHOICES: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Compute BLOCK_O outputs of BLOCK_T rows, over one split of the inputs.

    words to factors: from `_pointers`; most constants: from `_constants`. parts: fp32 sums of each split, if IS_SPLIT.
    choices, experts, CHOICES: choice, expert and of_each of launch_expert_product; CHOICES 0: no experts. With experts,
    num_rows counts choices instead of rows of x.
    """
    POSITIONS: tl.constexpr = 2 if KIND < 2 else 4
    CENTER: tl.constexpr = 1 << (KIND - 1) if KIND >= 4 else 0
    PER_GROUP: tl.constexpr = GROUP // K if GROUP else POSITIONS
    # True if all products of a span are summed at once, otherwise those of a group.
    IS_WHOLE: tl.constexpr = GROUP == 0 or FOLDS
    # Groups per unit.
    GROUPS: tl.constexpr = POSITIONS * K // GROUP if GROUP else 1
    # 8-bit scales are stored by span, four or two per word.
    OF_SPAN: tl.constexpr = GROUPS * SPAN
    PACK: tl.constexpr = 4 if OF_SPAN >= 4 else 2
    dtype = x.dtype.element_ty
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    panel = (o // 64).to(tl.int64)
    if CHOICES:
        expert = tl.load(experts + tl.program_id(1)).to(tl.int64)
        if expert >= num_experts:
            return
        panel += expert * ((num_outputs + 63) // 64)
        if bias is not None:
            bias += expert * num_outputs
        t = tl.load(choices + t).to(tl.int64)
        is_row = t < num_rows
        row = t // CHOICES
    else:
        is_row = t < num_rows
        row = t
    k = tl.arange(0, K)
    r = o % 64
    is_o = o < num_outputs
    # Padding of the last tile may lie past the last panel.
    panel = tl.where(is_o, panel, 0)
    x_row = x + row[None, :] * num_inputs + k[:, None]
    word_row = words + (panel * num_units * 64 * K)[:, None] + (r * K)[:, None] + k[None, :]
    ones = tl.full([BLOCK_O, K], 1.0, dtype)
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    first = tl.program_id(2) * spans_per_split
    for span in range(first, tl.minimum(first + spans_per_split, num_units // SPAN)):
        of_span = (panel * (num_units // SPAN) + span) * 64 + r
        if IS_NESTED:
            super_scale = tl.load(supers + of_span).to(tl.float32)
            if LEAST == 3:
                super_least = tl.load(super_leasts + of_span).to(tl.float32)
        for u in tl.static_range(SPAN):
            unit = span * SPAN + u
            word = tl.load(word_row + unit * 64 * K)
            if KIND == 5 and u == 0:
                upper = tl.load(high + ((panel * (num_units // 4) + span) * 64 + r)[:, None] * K + k[None, :])
            elif KIND == 6 and u % 2 == 0:
                upper = tl.load(high + ((panel * (num_units // 2) + unit // 2) * 64 + r)[:, None] * K + k[None, :])
            elif KIND < 5:
                upper = word
            codes = widen(word, upper, u if KIND == 5 else u % 2, KIND, LEVELS, dtype, NATIVE)
            for p in tl.static_range(POSITIONS):
                i = (unit * POSITIONS + p) * K
                mask = is_row[None, :] if IS_EVEN else is_row[None, :] & (i + k < num_inputs)[:, None]
                rows = tl.load(x_row + i, mask=mask, other=0.0)
                # Use every iteration's sums before it ends: Triton 3.6 otherwise leaves a product in flight at the
                # start of the next iteration, and the compiler reuses the registers of its codes too early. Without
                # asynchronous products, sums accumulate in place.
                if (u + p == 0) if IS_WHOLE else (p % PER_GROUP == 0):
                    product = acc if IN_PLACE else tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
                    sums = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
                word_of_span = of_span * (OF_SPAN // PACK) + (u * GROUPS + p // PER_GROUP) // PACK
                if FOLDS:
                    if p % PER_GROUP == 0:
                        if (u * GROUPS + p // PER_GROUP) % PACK == 0:
                            scale_word = tl.load(scales + word_of_span)
                        scale = number_of_byte(scale_word, (u * GROUPS + p // PER_GROUP) % PACK, FORMAT)
                    code = times(codes[p], scale, NATIVE)
                else:
                    code = codes[p]
                product = tl.dot(code, rows, product, input_precision="ieee")
                if LEAST:
                    sums = tl.dot(ones, rows, sums, input_precision="ieee")
                if (u + p == SPAN + POSITIONS - 2) if IS_WHOLE else (p % PER_GROUP == PER_GROUP - 1):
                    if IS_WHOLE:
                        acc = product if IN_PLACE else acc + product
                    else:
                        of_group = (panel * num_units * GROUPS + unit * GROUPS + p // PER_GROUP) * 64 + r
                        if FORMAT:
                            if (u * GROUPS + p // PER_GROUP) % PACK == 0:
                                scale_word = tl.load(scales + word_of_span)
                            scale = number_of_byte(scale_word, (u * GROUPS + p // PER_GROUP) % PACK, FORMAT)
                            if IS_NESTED:
                                scale *= super_scale
                        else:
                            scale = tl.load(scales + of_group).to(tl.float32)
                        acc += product * scale[:, None]
                        if LEAST:
                            if LEAST == 1:
                                least = tl.load(leasts + of_group).to(tl.float32)
                            else:
                                if (u * GROUPS + p // PER_GROUP) % PACK == 0:
                                    least_word = tl.load(leasts + word_of_span)
                                least = number_of_byte(least_word, (u * GROUPS + p // PER_GROUP) % PACK, 1)
                            if LEAST == 2:
                                least *= -scale
                            elif LEAST == 3:
                                least *= -super_least
                            acc += sums * (least + scale * CENTER)[:, None]
    mask = is_o[:, None] & is_row[None, :]
    if IS_SPLIT:
        part = parts + t[None, :] * num_outputs + o[:, None]
        stride = num_rows.to(tl.int64) * num_outputs
        tl.store(part + tl.program_id(2) * stride, acc, mask=mask)
        tl.debug_barrier()
        counter = counters + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") < splits - 1:
            return
        tl.store(counter, 0)
        acc = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
        for split in range(splits):
            acc += tl.load(part + split * stride, mask=mask, other=0.0, cache_modifier=".cg")
    if factors is not None:
        acc *= tl.load(factors + panel * 64 + r)[:, None]
    if bias is not None:
        acc += tl.load(bias + o, mask=is_o, other=0.0).to(tl.float32)[:, None]
    place = t[None, :] * out_stride + o[:, None]
    value = acc.to(dtype)
    if residual is not None:
        value = (value.to(tl.float32) + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out + place, value, mask=mask)


@partial(jit, do_not_specialize=["first_panel", "num_outputs"])
def _widen(
    words: tl.tensor,
    high: tl.tensor,
    scales: tl.tensor,
    leasts: tl.tensor,
    supers: tl.tensor,
    super_leasts: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    first_panel: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    num_units: tl.tensor,
    KIND: tl.constexpr,
    LEVELS: tl.constexpr,
    GROUP: tl.constexpr,
    LEAST: tl.constexpr,
    IS_NESTED: tl.constexpr,
    FORMAT: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    IS_EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    IS_RAW: tl.constexpr,
    BLOCK_O: tl.constexpr,
) -> None:
    """One program: a span of a panel. Rounds once, to the dtype of out. IS_RAW: writes codes of 8 bits as bytes."""
    POSITIONS: tl.constexpr = 2 if KIND < 2 else 4
    CENTER: tl.constexpr = 1 << (KIND - 1) if KIND >= 4 else 0
    PER_GROUP: tl.constexpr = GROUP // K if GROUP else POSITIONS
    GROUPS: tl.constexpr = POSITIONS * K // GROUP if GROUP else 1
    OF_SPAN: tl.constexpr = GROUPS * SPAN
    PACK: tl.constexpr = 4 if OF_SPAN >= 4 else 2
    dtype = out.dtype.element_ty
    r = tl.arange(0, BLOCK_O)
    o = tl.program_id(0) * BLOCK_O + r
    panel = (first_panel + tl.program_id(0)).to(tl.int64)
    span = tl.program_id(1)
    k = tl.arange(0, K)
    tile = r[:, None] * K + k[None, :]
    of_span = (panel * (num_units // SPAN) + span) * 64 + r
    if IS_NESTED:
        super_scale = tl.load(supers + of_span).to(tl.float32)
        if LEAST == 3:
            super_least = tl.load(super_leasts + of_span).to(tl.float32)
    for u in tl.static_range(SPAN):
        unit = span * SPAN + u
        word = tl.load(words + (panel * num_units + unit) * 64 * K + tile)
        if KIND == 5 and u == 0:
            upper = tl.load(high + (panel * (num_units // 4) + span) * 64 * K + tile)
        elif KIND == 6 and u % 2 == 0:
            upper = tl.load(high + (panel * (num_units // 2) + unit // 2) * 64 * K + tile)
        elif KIND < 5:
            upper = word
        if IS_RAW:
            codes = word & 255, (word >> 8) & 255
        else:
            codes = widen(word, upper, u if KIND == 5 else u % 2, KIND, LEVELS, dtype, NATIVE)
        for p in tl.static_range(POSITIONS):
            of_group = (panel * num_units * GROUPS + unit * GROUPS + p // PER_GROUP) * 64 + r
            word_of_span = of_span * (OF_SPAN // PACK) + (u * GROUPS + p // PER_GROUP) // PACK
            number = codes[p] if IS_RAW else codes[p].to(tl.float32)
            if GROUP and not IS_RAW:
                if FORMAT:
                    scale = number_of_byte(tl.load(scales + word_of_span), (u * GROUPS + p // PER_GROUP) % PACK, FORMAT)
                    if IS_NESTED:
                        scale *= super_scale
                else:
                    scale = tl.load(scales + of_group).to(tl.float32)
                if LEAST:
                    if LEAST == 1:
                        least = tl.load(leasts + of_group).to(tl.float32)
                    else:
                        least = number_of_byte(tl.load(leasts + word_of_span), (u * GROUPS + p // PER_GROUP) % PACK, 1)
                    if LEAST == 2:
                        least *= -scale
                    elif LEAST == 3:
                        least *= -super_least
                    number = (number + CENTER) * scale[:, None] + least[:, None]
                else:
                    number *= scale[:, None]
            if factors is not None and not IS_RAW:
                number *= tl.load(factors + panel * 64 + r)[:, None]
            i = (unit * POSITIONS + p) * K + k
            mask = (o < num_outputs)[:, None] & (i < num_inputs)[None, :]
            tl.store(out + o.to(tl.int64)[:, None] * num_inputs + i[None, :], number.to(dtype), mask=mask)
