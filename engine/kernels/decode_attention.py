"""Attention of one query per row over its blocks: what a decode step waits for, so every byte is read once.

The keys of all rows are shared out among programs (splits.py), whose results are put together (Dao et al. 2023,
"Flash-Decoding"). The G query heads that share a kv head are computed by one program.

In a pool of 8 bits the numbers of a row lie so close together that a matrix unit's operand would be picked up byte by
byte. So values are read two features at a time, as one number of 16 bits, and split into even and odd features when
they lie in registers. Both products are in fp16, which holds every code; values' scales are divided by the largest that
came so far, so that weights stay in its range.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from engine.kernels.eight_bits import as_bytes, from_code, from_codes
from engine.kernels.language import cdiv, has_fp8_casts, jit, power_of_2, tl
from engine.kernels.online_softmax import gather_row, places_of, reference_row
from engine.kernels.splits import KEYS, Splits, blocks_of

# T tokens of the step, R rows, H query heads, K kv heads, G = H / K, D head_dim, B blocks, S block_size, W programs of
# a kv head, P = W + R parts

_MIN_TILE = 16  # rows of a matrix unit's operand
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
    splits: Splits,
    out_THD: Tensor,
) -> None:
    """softmax(q k / sqrt(D)) v of the queries at `tokens_R` (int32 or int64), each the last position of its row.

    q, out: (T, H, D) bf16, fp16 or fp32; out is written at tokens_R only. codes, scales: a layer of the pool, of 8 bits
    or of q's dtype; see KVPool. tables: (R, B) int32 block ids; contexts: (R,) int32 keys of each row, its own
    included. A row of no keys gets zeros. splits: of these contexts and this window; results differ by rounding only.
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
        splits=splits,
        out_THD=out_THD,
    )


def resident_programs(*, has_scales: bool) -> int:
    """How many of the kernel's programs a processor runs at once: of four warps each, or, over 8 bits, of one."""
    return 8 if has_scales else 4


def reference_decode_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    tokens_R: Tensor,
    tables_RB: Tensor,
    contexts_R: Tensor,
    window: int | None,
    splits: Splits,
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
    splits: Splits,
    out_THD: Tensor,
) -> None:
    num_rows, num_heads, dim = len(tokens_R), q_THD.shape[1], q_THD.shape[2]
    _, _, num_kv_heads, block_size, _ = codes_B2KSD.shape
    assert q_THD.stride(-1) == 1 and out_THD.is_contiguous() and tables_RB.stride(-1) == 1
    num_programs = len(splits.rows_W)
    part_PHD = torch.empty(num_programs + num_rows, num_heads, dim, dtype=torch.float32, device=q_THD.device)
    largest_PH, total_PH = torch.empty(2, *part_PHD.shape[:2], dtype=torch.float32, device=q_THD.device)
    group = num_heads // num_kv_heads
    block_g, block_d = max(_MIN_TILE, power_of_2(group)), max(_MIN_TILE, power_of_2(dim))
    codes = as_bytes(codes_B2KSD)
    sizes = {"G": group, "K": num_kv_heads, "S": block_size, "D": dim, "BLOCK_G": block_g, "BLOCK_D": block_d}
    shared = (tokens_R, tables_RB, contexts_R, splits.starts_R, splits.rows_W, part_PHD, largest_PH, total_PH)
    numbers = (
        num_rows,
        math.log2(math.e) / math.sqrt(dim),
        q_THD.stride(0),
        q_THD.stride(1),
        tables_RB.stride(0),
    )
    if scales_B2KS is None:
        _attend_part[(num_programs, num_kv_heads)](
            q_THD,
            codes,
            codes,
            codes,
            *shared,
            *numbers,
            **sizes,
            BLOCK_N=KEYS,
            SHARED_N=KEYS,
            WINDOW=window or 0,
            HAS_SCALES=False,
            NATIVE=False,
            num_stages=2,  # of three, a processor would hold three programs, not four
        )
    else:
        # One warp, so that nothing waits for a barrier; as many as there are registers for run side by side.
        is_small = block_g == _MIN_TILE and block_d <= 128
        _attend_part[(num_programs, num_kv_heads)](
            q_THD,
            codes,
            codes.view(torch.int16),
            scales_B2KS.view(torch.int32) if block_size % 2 == 0 else scales_B2KS,
            *shared,
            *numbers,
            **sizes,
            BLOCK_N=32,
            SHARED_N=KEYS,
            WINDOW=window or 0,
            HAS_SCALES=True,
            NATIVE=has_fp8_casts(q_THD.device),
            num_warps=1 if is_small else 4,
            num_stages=4 if is_small else 3,
        )
    combine_parts(part_PHD, largest_PH, total_PH, splits, tokens_R, out_THD)


def combine_parts(
    part_PHD: Tensor, largest_PH: Tensor, total_PH: Tensor, splits: Splits, tokens_R: Tensor, out_THD: Tensor
) -> None:
    """Put the parts of each row's result together and store them at `tokens_R`."""
    _, num_heads, dim = part_PHD.shape
    block_d = min(_FEATURES_COMBINED, power_of_2(dim))
    _combine_parts[(len(tokens_R), num_heads, cdiv(dim, block_d))](
        part_PHD,
        largest_PH,
        total_PH,
        splits.starts_R,
        tokens_R,
        out_THD,
        len(tokens_R),
        H=num_heads,
        D=dim,
        BLOCK_P=_PARTS_COMBINED,
        BLOCK_D=block_d,
    )


@partial(jit, do_not_specialize=["num_rows", "table_stride"])
def _attend_part(
    q: tl.tensor,
    codes: tl.tensor,
    pairs: tl.tensor,
    scales: tl.tensor,
    tokens: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    part: tl.tensor,
    largest_out: tl.tensor,
    total_out: tl.tensor,
    num_rows: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    G: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """One program: the G queries of one kv head over its share of blocks, of one row or of several."""
    program, head = tl.program_id(0), tl.program_id(1)
    share = tl.load(starts + num_rows + 1)
    place = program * share
    stop = tl.minimum(place + share, tl.load(starts + num_rows))
    row = tl.load(rows + program)
    g, d, e = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    mask = (g < G)[:, None] & (d < D)[None, :]
    while place < stop:
        context = tl.load(contexts + row)
        skipped, count = blocks_of(context, WINDOW, SHARED_N)
        before = place - tl.load(starts + row)
        taken = tl.minimum(count - before, stop - place)
        first = (skipped + before) * SHARED_N
        end = tl.minimum(first + taken * SHARED_N, context)
        token = tl.load(tokens + row).to(tl.int64)
        query = q + token * q_token_stride + (head * G + g)[:, None] * q_head_stride + d[None, :]
        queries = tl.load(query, mask=mask, other=0.0)
        table = tables + row.to(tl.int64) * table_stride
        at = ((program + row).to(tl.int64) * K + head) * G + g
        if HAS_SCALES:
            even, odd, largest, total = _attend_codes(
                queries, codes, pairs, scales, table, head, first, end, context, scale,
                K, S, D, BLOCK_G, BLOCK_D, BLOCK_N, WINDOW, NATIVE,
            )  # fmt: skip
            if taken > 0:
                target = part + at[:, None] * D + 2 * e[None, :]
                mask_e = (g < G)[:, None] & (e < D // 2)[None, :]
                tl.store(target, even, mask=mask_e)
                tl.store(target + 1, odd, mask=mask_e)
        else:
            out, largest, total = _attend_numbers(
                queries, codes, table, head, first, end, context, scale,
                K, S, D, BLOCK_G, BLOCK_D, BLOCK_N, WINDOW,
            )  # fmt: skip
            if taken > 0:
                tl.store(part + at[:, None] * D + d[None, :], out, mask=mask)
        if taken > 0:
            tl.store(largest_out + at, largest, mask=g < G)
            tl.store(total_out + at, total, mask=g < G)
        place += taken
        row += 1


@jit
def _attend_numbers(
    q: tl.tensor,
    numbers: tl.tensor,
    table: tl.tensor,
    head: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    context: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Keys [first, end) of a row, of q's dtype -> out (G, D), largest (G), total (G): see online_softmax.py."""
    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    d = tl.arange(0, BLOCK_D)
    for n in range(first, end, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        is_key, is_d = key < end, d < D
        cell, slot = places_of(n, S, BLOCK_N)
        block = tl.load(table + cell, mask=is_key, other=0).to(tl.int64) * (2 * K * S * D)
        within = (head * S + slot) * D
        k = tl.load(
            numbers + block[None, :] + (within[None, :] + d[:, None]), mask=is_key[None, :] & is_d[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        grown, fade, weights = _weigh(scores, largest, key, end, context, WINDOW)
        v = tl.load(
            numbers + block[:, None] + ((within + K * S * D)[:, None] + d[None, :]),
            mask=is_key[:, None] & is_d[None, :],
            other=0.0,
        )
        out = tl.dot(weights.to(q.dtype), v, out * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weights, axis=1)
        largest = grown
    return out, largest, total


@jit
def _attend_codes(
    q: tl.tensor,
    codes: tl.tensor,
    pairs: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    head: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    context: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Keys [first, end) of a row, of 8 bits -> even features of out (G, D / 2), odd ones, largest (G), total (G)."""
    dtype: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
    q, power = _fit(q, dtype)
    scale *= power
    even = tl.zeros([BLOCK_G, BLOCK_D // 2], tl.float32)
    odd = tl.zeros([BLOCK_G, BLOCK_D // 2], tl.float32)
    largest = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    unit = 7.52316384526264e-37  # what values are multiples of: the largest scale so far, or 2^-120
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    for n in range(first, end, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        is_key = key < end
        cell, slot = places_of(n, S, BLOCK_N)
        block = tl.load(table + cell, mask=is_key, other=0).to(tl.int64) * (2 * K * S)
        within = head * S + slot
        k_scale = _scales_of(scales, table, head * S, n, end, K, S, BLOCK_N)
        v_scale = _scales_of(scales, table, (head + K) * S, n, end, K, S, BLOCK_N)
        k = tl.load(
            codes + (block * D)[None, :] + (within[None, :] * D + d[:, None]),
            mask=is_key[None, :] & (d < D)[:, None],
            other=0,
        )
        scores = tl.dot(q, from_code(k, dtype, NATIVE), input_precision="ieee")
        scores *= (k_scale * scale)[None, :]
        grown, fade, weights = _weigh(scores, largest, key, end, context, WINDOW)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(
            pairs + (block * (D // 2))[:, None] + ((within + K * S)[:, None] * (D // 2) + e[None, :]),
            mask=is_key[:, None] & (e < D // 2)[None, :],
            other=0,
        )
        v_even, v_odd = from_codes(v, codes.dtype.element_ty == tl.int8, dtype, NATIVE)
        wider = tl.maximum(unit, tl.max(v_scale, axis=0))
        fade *= unit / wider
        weights = (weights * (v_scale * (1.0 / wider))[None, :]).to(dtype)
        even = tl.dot(weights, v_even, even * fade[:, None], input_precision="ieee")
        odd = tl.dot(weights, v_odd, odd * fade[:, None], input_precision="ieee")
        largest, unit = grown, wider
    return even * unit, odd * unit, largest, total


@jit
def _weigh(
    scores: tl.tensor,
    largest: tl.tensor,
    key: tl.tensor,
    end: tl.tensor,
    context: tl.tensor,
    WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """-> the largest score now, what came before is multiplied by, and the weights of these keys."""
    is_seen = key < end
    if WINDOW > 0:
        is_seen = is_seen & (key >= context - WINDOW)
    scores = tl.where(is_seen[None, :], scores, -float("inf"))
    grown = tl.maximum(largest, tl.max(scores, axis=1))
    base = grown
    if WINDOW > 0:
        base = tl.where(grown == -float("inf"), 0.0, grown)  # of these keys none is seen
    return grown, tl.exp2(largest - base), tl.exp2(scores - base[:, None])


@jit
def _fit(q: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Queries (G, D) as `dtype`, and the power of two that they are multiples of: so fp16 has room for bf16."""
    power = 1.0
    if dtype != q.dtype:
        wide = q.to(tl.float32)
        most = tl.max(tl.max(tl.abs(wide), axis=1), axis=0).to(tl.int32, bitcast=True)
        power = (tl.minimum(tl.maximum(most, 0x03800000), 0x7B000000) & 0x7F800000).to(tl.float32, bitcast=True)
        q = (wide / power).to(dtype)
    return q, power


@jit
def _scales_of(
    scales: tl.tensor,
    table: tl.tensor,
    place: tl.tensor,
    n: tl.tensor,
    end: tl.tensor,
    K: tl.constexpr,
    S: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """The scales of keys n, n + 1, …, as fp32 (BLOCK_N); `place`: where they begin in a block. Zero from `end` on.

    Two are read at once, if they are given as int32: copies into shared memory, which run ahead, have 4 bytes or more.
    """
    if scales.dtype.element_ty == tl.int32:
        key = n + 2 * tl.arange(0, BLOCK_N // 2)
        cell, slot = places_of(n // 2, S // 2, BLOCK_N // 2)
        block = tl.load(table + cell, mask=key < end, other=0).to(tl.int64) * (K * S)
        words = tl.load(scales + block + (place // 2 + slot), mask=key < end, other=0)
        first = (words << 16).to(tl.float32, bitcast=True)
        second = tl.where(key + 1 < end, words & -0x10000, 0).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(first, second), [BLOCK_N])
    key = n + tl.arange(0, BLOCK_N)
    cell, slot = places_of(n, S, BLOCK_N)
    block = tl.load(table + cell, mask=key < end, other=0).to(tl.int64) * (2 * K * S)
    return tl.load(scales + block + (place + slot), mask=key < end, other=0.0).to(tl.float32)


@partial(jit, do_not_specialize=["num_rows"])
def _combine_parts(
    part: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    starts: tl.tensor,
    tokens: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: BLOCK_D features of one query head of one row, BLOCK_P parts at a time."""
    row, head = tl.program_id(0), tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    whole = whole_of_parts(part, largest, total, starts, row, head, d, num_rows, H, D, BLOCK_P)
    token = tl.load(tokens + row).to(tl.int64)
    tl.store(out + (token * H + head) * D + d, whole.to(out.dtype.element_ty), mask=d < D)


@jit
def whole_of_parts(
    part: tl.tensor,
    largest_in: tl.tensor,
    total_in: tl.tensor,
    starts: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    d: tl.tensor,
    num_rows: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> tl.tensor:
    """The features `d` of one row's head, BLOCK_P parts at a time; zeros of a row without keys."""
    share = tl.load(starts + num_rows + 1)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    first, last = begin // share, (end + share - 1) // share  # programs; of a row without keys, none
    last = tl.where(begin < end, last, first)
    p = tl.arange(0, BLOCK_P)
    base = -1e30
    total = 0.0
    result = tl.zeros(d.shape, tl.float32)
    for start in range(first, last, BLOCK_P):
        is_part = start + p < last
        place = (start + p + row).to(tl.int64) * H + head
        largest = tl.load(largest_in + place, mask=is_part, other=-float("inf"))
        grown = tl.maximum(base, tl.max(largest, axis=0))
        fade = tl.exp2(base - grown)
        weight = tl.exp2(largest - grown)
        total = total * fade + tl.sum(weight * tl.load(total_in + place, mask=is_part, other=0.0), axis=0)
        parts = tl.load(part + place[:, None] * D + d[None, :], mask=is_part[:, None] & (d < D)[None, :], other=0.0)
        result = result * fade + tl.sum(parts * weight[:, None], axis=0)
        base = grown
    return result / tl.where(total == 0.0, 1.0, total)
