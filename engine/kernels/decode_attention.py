"""Attention of one query per row over its blocks: what a decode step waits for, so every byte is read once.

The keys of a row are split among programs, whose results are put together (Dao et al. 2023, "Flash-Decoding"), so that
a few long rows keep the whole device busy. The G query heads that share a kv head are computed by one program.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from engine.kernels.eight_bits import as_bytes
from engine.kernels.language import cdiv, has_fp8_casts, jit, power_of_2, tl
from engine.kernels.online_softmax import attend_block, gather_row, reference_row

# T tokens of the step, R rows, H query heads, K kv heads, G = H / K, D head_dim, B blocks, S block_size, P splits

_MIN_TILE = 16  # rows of a matrix unit's operand
_KEYS = 64  # of one step of a program
_MIN_KEYS_PER_SPLIT = 256
_PROGRAMS_PER_PROCESSOR = 4
_PARTS_COMBINED, _FEATURES_COMBINED = 16, 128  # at a time, in one program


def decode_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    tokens_R: Tensor,
    tables_RB: Tensor,
    contexts_R: Tensor,
    window: int | None,
    num_splits: int,
    out_THD: Tensor,
) -> None:
    """softmax(q k / sqrt(D)) v of the queries at `tokens_R` (int32 or int64), each the last position of its row.

    q, out: (T, H, D) bf16, fp16 or fp32; out is written at tokens_R only. codes, scales: a layer of the pool, of 8 bits
    or of q's dtype; see KVPool. tables: (R, B) int32 block ids; contexts: (R,) int32 keys of each row, its own
    included. A row of no keys gets zeros. num_splits: see `splits_for`; results differ by rounding only.
    """
    attend = launch_decode_attention if q_THD.is_cuda else reference_decode_attention
    attend(
        q_THD,
        codes_B2KSD,
        scales_B2KS,
        tokens_R=tokens_R,
        tables_RB=tables_RB,
        contexts_R=contexts_R,
        window=window,
        num_splits=num_splits,
        out_THD=out_THD,
    )


def splits_for(num_rows: int, num_kv_heads: int, longest: int, device: torch.device) -> int:
    """Into how many parts to split the keys of each row, the longest of which has `longest`. On a CPU, one."""
    if device.type != "cuda":
        return 1
    num_programs = torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_PROCESSOR
    wanted = cdiv(num_programs, max(1, num_rows * num_kv_heads))
    return max(1, min(wanted, cdiv(longest, _MIN_KEYS_PER_SPLIT)))


def reference_decode_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    tokens_R: Tensor,
    tables_RB: Tensor,
    contexts_R: Tensor,
    window: int | None,
    num_splits: int,
    out_THD: Tensor,
) -> None:
    for token, table, context in zip(tokens_R.tolist(), tables_RB, contexts_R.tolist(), strict=True):
        kv_2KLD = gather_row(codes_B2KSD, scales_B2KS, table, context)
        out_THD[token] = reference_row(q_THD[token].unsqueeze(0), kv_2KLD, window=window)[0] if context else 0


def launch_decode_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    tokens_R: Tensor,
    tables_RB: Tensor,
    contexts_R: Tensor,
    window: int | None,
    num_splits: int,
    out_THD: Tensor,
) -> None:
    num_rows, num_heads, dim = len(tokens_R), q_THD.shape[1], q_THD.shape[2]
    _, _, num_kv_heads, block_size, _ = codes_B2KSD.shape
    has_scales = scales_B2KS is not None
    assert q_THD.stride(-1) == 1 and out_THD.is_contiguous() and tables_RB.stride(-1) == 1
    block_d = max(_MIN_TILE, power_of_2(dim))
    part_RHPD = torch.empty(num_rows, num_heads, num_splits, dim, dtype=torch.float32, device=q_THD.device)
    largest_RHP, total_RHP = torch.empty(2, num_rows, num_heads, num_splits, dtype=torch.float32, device=q_THD.device)
    group = num_heads // num_kv_heads
    _attend_split[(num_rows, num_kv_heads, num_splits)](
        q_THD,
        as_bytes(codes_B2KSD),
        scales_B2KS if has_scales else codes_B2KSD,
        tokens_R,
        tables_RB,
        contexts_R,
        part_RHPD,
        largest_RHP,
        total_RHP,
        math.log2(math.e) / math.sqrt(dim),
        q_THD.stride(0),
        q_THD.stride(1),
        tables_RB.stride(0),
        G=group,
        K=num_kv_heads,
        S=block_size,
        D=dim,
        BLOCK_G=max(_MIN_TILE, power_of_2(group)),
        BLOCK_N=_KEYS,
        BLOCK_D=block_d,
        WINDOW=window or 0,
        HAS_SCALES=has_scales,
        NATIVE=has_fp8_casts(q_THD.device),
        num_stages=3,
    )
    combine_splits(part_RHPD, largest_RHP, total_RHP, tokens_R, out_THD)


def combine_splits(
    part_RHPD: Tensor, largest_RHP: Tensor, total_RHP: Tensor, tokens_R: Tensor, out_THD: Tensor
) -> None:
    """Put the parts of each row's result together and store them at `tokens_R`. What has a largest score of -inf is of
    no keys, and its part is not read."""
    num_rows, num_heads, num_splits, dim = part_RHPD.shape
    block_d = min(_FEATURES_COMBINED, power_of_2(dim))
    _combine_splits[(num_rows, num_heads, cdiv(dim, block_d))](
        part_RHPD,
        largest_RHP,
        total_RHP,
        tokens_R,
        out_THD,
        num_splits,
        H=num_heads,
        D=dim,
        BLOCK_P=_PARTS_COMBINED,
        BLOCK_D=block_d,
    )


@partial(jit, do_not_specialize=["table_stride"])
def _attend_split(
    q: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    tokens: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    part: tl.tensor,
    largest_out: tl.tensor,
    total_out: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    G: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """One program: the G queries of one row and kv head over one part of the row's keys."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    context = tl.load(contexts + row)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(context - WINDOW, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(context - lowest, num_splits), BLOCK_N) * BLOCK_N
    first = lowest + split * share
    end = tl.minimum(first + share, context)

    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    mask = (g < G)[:, None] & (d < D)[None, :]
    token = tl.load(tokens + row).to(tl.int64)
    query = q + token * q_token_stride + (head * G + g)[:, None] * q_head_stride + d[None, :]
    queries = tl.load(query, mask=mask, other=0.0)
    position = tl.zeros([BLOCK_G], tl.int32) + context - 1

    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    table = tables + row.to(tl.int64) * table_stride
    for n in range(first, end, BLOCK_N):
        out, largest, total = attend_block(
            out,
            largest,
            total,
            queries,
            position,
            n,
            end,
            codes,
            scales,
            table,
            head,
            scale,
            K,
            S,
            D,
            BLOCK_N,
            BLOCK_D,
            WINDOW,
            HAS_SCALES,
            NATIVE,
            True,
        )
    place = (row.to(tl.int64) * K * G + head * G + g) * num_splits + split
    if first < end:
        tl.store(part + place[:, None] * D + d[None, :], out, mask=mask)
    tl.store(largest_out + place, largest, mask=g < G)
    tl.store(total_out + place, total, mask=g < G)


@partial(jit, do_not_specialize=["num_splits"])
def _combine_splits(
    part: tl.tensor,
    largest_in: tl.tensor,
    total_in: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,
    num_splits: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: BLOCK_D features of one query head of one row, BLOCK_P parts at a time."""
    row, head = tl.program_id(0), tl.program_id(1)
    p, d = tl.arange(0, BLOCK_P), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = (row.to(tl.int64) * H + head) * num_splits
    base = -1e30  # stays where the row has no key at all
    total = 0.0
    result = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_P):
        is_part = start + p < num_splits
        place = first + start + p
        largest = tl.load(largest_in + place, mask=is_part, other=-float("inf"))
        grown = tl.maximum(base, tl.max(largest, axis=0))
        fade = tl.exp2(base - grown)
        weight = tl.exp2(largest - grown)
        total = total * fade + tl.sum(weight * tl.load(total_in + place, mask=is_part, other=0.0), axis=0)
        mask = (largest > -float("inf"))[:, None] & (d < D)[None, :]
        parts = tl.load(part + place[:, None] * D + d[None, :], mask=mask, other=0.0)
        result = result * fade + tl.sum(parts * weight[:, None], axis=0)
        base = grown
    result = result / tl.where(total == 0.0, 1.0, total)
    token = tl.load(tokens + row).to(tl.int64)
    tl.store(out + (token * H + head) * D + d, result.to(out.dtype.element_ty), mask=d < D)
