"""W8A8 product: int8 weights and activations quantized to int8, accumulated as exact integers.

    x[t] ~ scale[t] * code[t]     scale = max|x| / 127     code = nearest(x / scale)
    out[t, o] = residual[t, o] + (scale[t] * scale[o] * (code[t] . code[o]) + bias[o])

Activations are quantized per row at run time. For few rows the inputs are split as in quantized_matmul.py. FP8 products
quantize their activations here too, with e4m3 codes and max|x| / 448.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.language import cdiv, jit, power_of_2, tl
from engine.kernels.quant.quantized_matmul import splits_for
from engine.kernels.quant.row_quantization import MOST, as_bytes, to_e4m3, to_int8

# T tokens, I input features, O output features

# Inputs per loop iteration; codes are padded to a multiple with zeros.
DEPTH = 128


def launch_quantize_inputs(x_TI: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Return codes (T, I padded with zeros to a multiple of 128) of dtype, int8 or e4m3, and scales (T,) fp32."""
    num_rows, num_inputs = x_TI.shape
    x_TI, width = x_TI.contiguous(), cdiv(num_inputs, DEPTH) * DEPTH
    codes_TI = torch.empty(num_rows, width, dtype=dtype, device=x_TI.device)
    scales_T = torch.empty(num_rows, dtype=torch.float32, device=x_TI.device)
    block = power_of_2(width)
    warps = max(1, min(16, block // 512))
    _quantize[(num_rows,)](
        x_TI, as_bytes(codes_TI), scales_T, num_inputs, width, MOST=MOST[dtype], BLOCK=block, num_warps=warps
    )
    return codes_TI, scales_T


def launch_int8_product(
    x_TI: Tensor,
    codes_OI: Tensor,
    scales_O: Tensor,
    counters: Tensor,
    *,
    bias_O: Tensor | None = None,
    residual_TO: Tensor | None = None,
    sizes: tuple[int, int, int, int] | None = None,
    splits: int | None = None,
) -> Tensor:
    """Multiply: (T, O) of x's dtype, rounded before the residual is added.

    codes, scales: from `launch_quantize_inputs`. counters: as in launch_coded_product. sizes: outputs and rows of a
    program, its warps, and loop stages; for tests.
    """
    (num_rows, _), (num_outputs, width) = x_TI.shape, codes_OI.shape
    out_TO = x_TI.new_empty(num_rows, num_outputs)
    if not num_rows:
        return out_TO
    codes_TI, scales_T = launch_quantize_inputs(x_TI)
    outputs, rows, num_warps, num_stages = sizes or _sizes(num_rows)
    num_tiles, depth = (cdiv(num_outputs, outputs), cdiv(num_rows, rows)), width // DEPTH
    splits = splits or (splits_for(num_tiles[0], depth, x_TI.device) if num_tiles[1] == 1 else 1)
    per_split = cdiv(depth, splits)
    splits = cdiv(depth, per_split)
    parts = x_TI.new_empty(splits, num_rows, num_outputs, dtype=torch.int32) if splits > 1 else counters
    _product[(*num_tiles, splits)](
        codes_TI,
        scales_T,
        codes_OI,
        scales_O,
        parts,
        counters,
        out_TO,
        bias_O,
        None if residual_TO is None else residual_TO.contiguous(),
        num_rows,
        num_outputs,
        width,
        per_split,
        splits,
        IS_SPLIT=splits > 1,
        BLOCK_O=outputs,
        BLOCK_T=rows,
        DEPTH=DEPTH,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out_TO


def _sizes(num_rows: int) -> tuple[int, int, int, int]:
    if num_rows <= 32:
        return 64, max(16, power_of_2(num_rows)), 4, 4
    return (64, 64, 4, 4) if num_rows <= 64 else (128, 128, 8, 3)


@jit
def _quantize(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    num_inputs: tl.tensor,
    width: tl.tensor,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row * num_inputs + i, mask=i < num_inputs, other=0.0).to(tl.float32)
    # As integers, magnitudes keep their order and NaN is the largest.
    sizes = tl.abs(value).to(tl.int32, bitcast=True)
    scale = tl.div_rn(tl.maximum(tl.max(sizes, axis=0), 0x0DA24260).to(tl.float32, bitcast=True), MOST)  # 1e-30
    value = tl.div_rn(value, scale)
    tl.store(codes + row * width + i, to_int8(value) if MOST == 127 else to_e4m3(value), mask=i < width)
    tl.store(scales + row, scale)


@partial(jit, do_not_specialize=["num_rows", "per_split", "splits"])
def _product(
    x: tl.tensor,
    x_scales: tl.tensor,
    weights: tl.tensor,
    weight_scales: tl.tensor,
    parts: tl.tensor,
    counters: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    width: tl.tensor,
    per_split: tl.tensor,
    splits: tl.tensor,
    IS_SPLIT: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """One program: BLOCK_O outputs of BLOCK_T rows, over its share of the inputs."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    is_o, is_row = o < num_outputs, t < num_rows
    k = tl.arange(0, DEPTH)
    weight_row = weights + tl.where(is_o, o, 0).to(tl.int64)[:, None] * width + k[None, :]
    row = x + t[None, :] * width + k[:, None]
    acc = tl.zeros([BLOCK_O, BLOCK_T], tl.int32)
    first = tl.program_id(2) * per_split * DEPTH
    for start in range(first, tl.minimum(first + per_split * DEPTH, width), DEPTH):
        codes = tl.load(row + start, mask=is_row[None, :], other=0)
        acc = tl.dot(tl.load(weight_row + start), codes, acc, out_dtype=tl.int32)
    mask = is_o[:, None] & is_row[None, :]
    if IS_SPLIT:
        part = parts + t[None, :] * num_outputs + o[:, None]
        stride = num_rows.to(tl.int64) * num_outputs
        tl.store(part + tl.program_id(2) * stride, acc, mask=mask)
        tl.debug_barrier()
        if tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") < splits - 1:
            return
        tl.store(counters + tl.program_id(0), 0)
        acc = tl.zeros([BLOCK_O, BLOCK_T], tl.int32)
        for split in range(splits):
            acc += tl.load(part + split * stride, mask=mask, other=0, cache_modifier=".cg")
    x_scale = tl.load(x_scales + t, mask=is_row, other=0.0)
    weight_scale = tl.load(weight_scales + o, mask=is_o, other=0.0)
    value = acc.to(tl.float32) * x_scale[None, :] * weight_scale[:, None]
    if bias is not None:
        value += tl.load(bias + o, mask=is_o, other=0.0).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    place = t[None, :] * num_outputs + o[:, None]
    value = value.to(dtype)
    if residual is not None:
        value = (value.to(tl.float32) + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out + place, value, mask=mask)
