"""Absorbed latent attention for rows with one query: all heads share one key per token, the row itself.

    s_hj = (q_h . row_j) scale      out_h = V_h (softmax(s_h) latents)      row_j = (latent_j, rotated key_j)

Values are the first part of the keys, so a block is read once for both, and for as many heads as fit a program's
registers (up to 64). As in decode_attention, keys are split among programs. Row format: engine/kv/layout.py.

A second kernel combines the P partial sums of latents and expands them to the heads' values:

    out_h = V_h round(sum_p 2^(m_p - m) part_p / sum_p 2^(m_p - m) l_p)      round: to the activations' dtype

A program combines a few rows of one head and multiplies them with the head's matrix. With few rows several programs
split a head's features, and each combines the parts for itself.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from engine.kernels.attention.decode_attention import whole_of_parts
from engine.kernels.attention.kv_splits import KEYS, Splits, blocks_of
from engine.kernels.attention.online_softmax import places_of, weigh
from engine.kernels.language import cdiv, has_fp8_casts, jit, power_of_2, tl
from engine.kernels.quant.code_words import widen
from engine.kernels.quant.row_quantization import as_bytes, from_codes

# R rows, H query heads of this rank, D = C + P: latent_dim C and rope_dim P, W value_dim, B blocks, S block_size;
# in launch functions P: number of parts, programs plus rows

# Heads per program.
_MIN_HEADS, _MOST_HEADS = 16, 64
# Rows per program of the second kernel: the height of a matrix operand.
_MOST_ROWS = 16
_BLOCK_W, _BLOCK_P = 32, 8


def heads_at_once(num_heads: int) -> int:
    """Return the number of heads per program."""
    return min(_MOST_HEADS, max(_MIN_HEADS, power_of_2(num_heads)))


def splits_of_latents(contexts_R: Tensor, *, num_heads: int, longest: int) -> Splits:
    """Split the rows' keys for this kernel; see Splits.of."""
    block_h = heads_at_once(num_heads)
    resident = 2 if block_h == _MIN_HEADS else 1
    return Splits.of(contexts_R, num_heads=cdiv(num_heads, block_h), longest=longest, resident=resident)


def launch_latent_decode_attention(
    q_RHD: Tensor,
    codes_B11SD: Tensor,
    scales_B11S: Tensor | None,
    value_HWC: Tensor,
    *,
    scale: float,
    tables_RB: Tensor,
    contexts_R: Tensor,
    splits: Splits,
) -> Tensor:
    """Return the attention output (R, H, W) of absorbed queries, absorbed part first.

    q: (R, H, D) bf16, fp16 or fp32, each the last position of its row. codes, scales: a layer of a latent pool, 8
    bits with scales or of q's dtype; index keys at the end of its rows are ignored. value: contiguous, of q's dtype;
    weighted sums of latents are rounded to it before the expansion. tables: (R, B) int32 block ids; contexts: (R,)
    int32 keys of each row; rows without keys get zeros. splits: Splits of these contexts.
    """
    (num_rows, num_heads, dim), device = q_RHD.shape, q_RHD.device
    _, value_dim, latent_dim = value_HWC.shape
    has_scales, rope_dim = scales_B11S is not None, dim - latent_dim
    assert q_RHD.is_contiguous() and tables_RB.stride(-1) == 1 and codes_B11SD.is_contiguous()
    codes = as_bytes(codes_B11SD)
    # View in which rotated keys are bf16 numbers.
    exact = codes_B11SD.view(torch.bfloat16) if has_scales else codes_B11SD
    num_programs, block_h = len(splits.rows_W), heads_at_once(num_heads)
    part_PHC = torch.empty(num_programs + num_rows, num_heads, latent_dim, dtype=torch.float32, device=device)
    largest_PH, total_PH = torch.empty(2, *part_PHC.shape[:2], dtype=torch.float32, device=device)
    out_RHW = q_RHD.new_empty(num_rows, num_heads, value_dim)
    is_small = block_h == _MIN_HEADS
    _attend_latents[(num_programs, cdiv(num_heads, block_h))](
        q_RHD,
        codes.view(torch.int16) if has_scales else codes,
        exact,
        scales_B11S if has_scales else codes,
        tables_RB,
        contexts_R,
        splits.starts_R,
        splits.rows_W,
        part_PHC,
        largest_PH,
        total_PH,
        num_rows,
        scale * math.log2(math.e),
        tables_RB.stride(0),
        H=num_heads,
        S=codes_B11SD.shape[3],
        C=latent_dim,
        P=rope_dim,
        WIDTH=codes.shape[-1] // (2 if has_scales else 1),
        EXACT_WIDTH=exact.shape[-1],
        EXACT_FIRST=latent_dim // 2 if has_scales else latent_dim,
        BLOCK_H=block_h,
        BLOCK_N=32 if is_small else 64,
        SHARED_N=KEYS,
        BLOCK_C=max(16, power_of_2(latent_dim)),
        BLOCK_P=max(16, power_of_2(rope_dim)),
        HAS_SCALES=has_scales,
        IS_INT8=codes.dtype == torch.int8,
        NATIVE=has_fp8_casts(device),
        IN_PAIRS=q_RHD.dtype == torch.bfloat16 and device.type == "cuda",
        num_warps=4 if is_small else 8,
        num_stages=3 if is_small else 2,
    )
    _launch_values(part_PHC, largest_PH, total_PH, splits, value_HWC, out_RHW)
    return out_RHW


@partial(jit, do_not_specialize=["num_rows", "table_stride"])
def _attend_latents(
    q: tl.tensor,
    codes: tl.tensor,
    exact: tl.tensor,
    scales: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    part: tl.tensor,
    largest_out: tl.tensor,
    total_out: tl.tensor,
    num_rows: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    H: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT_WIDTH: tl.constexpr,
    EXACT_FIRST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_INT8: tl.constexpr,
    NATIVE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
) -> None:
    """One program: BLOCK_H heads over its share of blocks, of one or more rows."""
    program = tl.program_id(0)
    share = tl.load(starts + num_rows + 1)
    place = program * share
    stop = tl.minimum(place + share, tl.load(starts + num_rows))
    row = tl.load(rows + program)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    p = tl.arange(0, BLOCK_P)
    is_head = h < H
    while place < stop:
        context = tl.load(contexts + row)
        _, count = blocks_of(context, 1, 0, 0, SHARED_N)
        before = place - tl.load(starts + row)
        taken = tl.minimum(count - before, stop - place)
        end = tl.minimum((before + taken) * SHARED_N, context)
        query = q + (row.to(tl.int64) * H + h)[:, None] * (C + P)
        q_rope = tl.load(query + C + p[None, :], mask=is_head[:, None] & (p < P)[None, :], other=0.0)
        table = tables + row.to(tl.int64) * table_stride
        # Read 8-bit codes in pairs and split them, because matrix operands would be loaded byte by byte.
        STEP: tl.constexpr = 2 if HAS_SCALES else 1
        c = tl.arange(0, BLOCK_C // STEP)
        is_c = c * STEP < C
        q_mask = is_head[:, None] & is_c[None, :]
        q_latent = tl.load(query + c[None, :] * STEP, mask=q_mask, other=0.0)
        out = tl.zeros([BLOCK_H, BLOCK_C // STEP], tl.float32)
        if HAS_SCALES:
            q_odd = tl.load(query + c[None, :] * STEP + 1, mask=q_mask, other=0.0)
            out_odd = tl.zeros([BLOCK_H, BLOCK_C // STEP], tl.float32)
        largest = tl.full([BLOCK_H], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        for n in range(before * SHARED_N, end, BLOCK_N):
            is_key = n + tl.arange(0, BLOCK_N) < end
            cell, slot = places_of(n, S, BLOCK_N)
            block = tl.load(table + cell, mask=is_key, other=0).to(tl.int64) * S
            latent = tl.load(
                codes + (block * WIDTH)[:, None] + (slot[:, None] * WIDTH + c[None, :]),
                mask=is_key[:, None] & is_c[None, :],
                other=0,
            )
            if HAS_SCALES:
                if IN_PAIRS:
                    latent, odd = widen(latent, latent, 0, 1 if IS_INT8 else 0, None, q_latent.dtype, True)
                else:
                    latent, odd = from_codes(latent, IS_INT8, q_latent.dtype, NATIVE)
            scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
            if HAS_SCALES:
                scores = tl.dot(q_odd, tl.trans(odd), scores, input_precision="ieee")
                row_scale = tl.load(scales + (block + slot), mask=is_key, other=0.0).to(tl.float32)
                scores *= row_scale[None, :]
            rope = tl.load(
                exact + (block * EXACT_WIDTH)[:, None] + (slot[:, None] * EXACT_WIDTH + EXACT_FIRST + p[None, :]),
                mask=is_key[:, None] & (p < P)[None, :],
                other=0.0,
            ).to(q_rope.dtype)
            scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
            # Every iteration has at least one key, so the largest score is finite.
            scores = tl.where(is_key[None, :], scores, -float("inf"))
            largest, fade, weights = weigh(scores, largest, is_key[None, :], scale, 0.0, False)
            total = total * fade + tl.sum(weights, axis=1)
            if HAS_SCALES:
                weights *= row_scale[None, :]
            weights = weights.to(q_latent.dtype)
            out = tl.dot(weights, latent, out * fade[:, None], input_precision="ieee")
            if HAS_SCALES:
                out_odd = tl.dot(weights, odd, out_odd * fade[:, None], input_precision="ieee")
        if taken > 0:
            at = (program + row).to(tl.int64) * H + h
            target = part + at[:, None] * C + c[None, :] * STEP
            tl.store(target, out, mask=q_mask)
            if HAS_SCALES:
                tl.store(target + 1, out_odd, mask=q_mask)
            tl.store(largest_out + at, largest, mask=is_head)
            tl.store(total_out + at, total, mask=is_head)
        place += taken
        row += 1


def _launch_values(
    part_PHC: Tensor, largest_PH: Tensor, total_PH: Tensor, splits: Splits, value_HWC: Tensor, out_RHW: Tensor
) -> None:
    """Combine and expand the partial results of `splits`. value: contiguous. out: dense in W, rows in splits' order."""
    num_rows, num_heads, value_dim = out_RHW.shape
    latent_dim = value_HWC.shape[2]
    assert value_HWC.is_contiguous() and out_RHW.stride(-1) == 1
    rows, features = _share(num_rows, num_heads, value_dim, out_RHW.device)
    _latent_values[(cdiv(num_rows, rows), num_heads, cdiv(value_dim, features))](
        part_PHC,
        largest_PH,
        total_PH,
        splits.starts_R,
        value_HWC,
        out_RHW,
        num_rows,
        rows,
        features,
        out_RHW.stride(0),
        out_RHW.stride(1),
        H=num_heads,
        C=latent_dim,
        W=value_dim,
        BLOCK_M=_MOST_ROWS,
        BLOCK_P=_BLOCK_P,
        BLOCK_C=max(16, power_of_2(latent_dim)),
        BLOCK_W=_BLOCK_W,
        num_warps=4,
        num_stages=2,
    )


def _share(num_rows: int, num_heads: int, value_dim: int, device: torch.device) -> tuple[int, int]:
    """Return rows and features per program, such that every multiprocessor gets a program if possible.

    On a CPU both are split, so that tests cover it.
    """
    if device.type != "cuda":
        return 2, _BLOCK_W
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    features = value_dim if num_rows * num_heads >= processors else _BLOCK_W
    rows = _MOST_ROWS
    while rows > 1 and cdiv(num_rows, rows) * num_heads * cdiv(value_dim, features) < processors:
        rows //= 2
    return rows, features


@partial(jit, do_not_specialize=["num_rows", "rows", "features"])
def _latent_values(
    part: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    starts: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    rows: tl.tensor,
    features: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    H: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """One program: `features` of one head's values, for `rows` rows."""
    head, first = tl.program_id(1), tl.program_id(0) * rows
    count = tl.minimum(rows, num_rows - first)
    m, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    sums = tl.zeros([BLOCK_M, BLOCK_C], out.dtype.element_ty)
    for i in range(count):
        whole = whole_of_parts(part, largest, total, starts, first + i, head, None, c, num_rows, H, C, BLOCK_P)
        sums = tl.where((m == i)[:, None], whole.to(out.dtype.element_ty)[None, :], sums)
    place = out + (first + m).to(tl.int64)[:, None] * out_row_stride + head * out_head_stride
    begin = tl.program_id(2) * features
    for start in range(begin, tl.minimum(begin + features, W), BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        value = tl.load(
            values + (head * W + w)[None, :] * C + c[:, None], mask=(w < W)[None, :] & (c < C)[:, None], other=0.0
        )
        result = tl.dot(sums, value, input_precision="ieee").to(out.dtype.element_ty)
        tl.store(place + w[None, :], result, mask=(m < count)[:, None] & (w < W)[None, :])
