"""Paged attention for rows with few queries, as in decode steps. Every KV byte is read once.

The keys of all query groups (queries.py) are split evenly among programs (kv_splits.py), whose partial results are
combined (Dao et al. 2023, "Flash-Decoding"). One program computes the G query heads of a KV head for all queries of a
group.

In 8-bit pools, codes used as matrix operands directly would be loaded byte by byte. Values are therefore read two
features at a time as int16 and split into even and odd features in registers. Both products are in fp16, which
represents every code exactly; value scales are divided by the largest so far, so that weights stay in its range.

In int4 pools a byte has two features, which are put side by side. Queries are rotated like the rows (hadamard.py), and
results turned back. A key's zero times the query's sum adds to its score; a value's zero times its weight adds to every
feature.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.attention.attention_rule import AttentionRule, capped, is_in_reach, sink_of
from engine.kernels.attention.kv_splits import KEYS, Splits, blocks_of
from engine.kernels.attention.online_softmax import places_of
from engine.kernels.attention.queries import TILE_ROWS, QueryGroups
from engine.kernels.language import cdiv, has_fp8_casts, jit, power_of_2, tl
from engine.kernels.quant.hadamard import rotate_queries, unrotate_tile
from engine.kernels.quant.row_quantization import (
    INT4,
    as_bytes,
    from_code,
    from_codes,
    nibbles_in_columns,
    nibbles_in_rows,
    scale_and_zero,
)

# T tokens of the step, R rows of kv_splits.py, each a group of up to Q queries, N queries, H query heads, K kv heads,
# G = H / K, D head_dim, B blocks, S block_size, W programs of a kv head, P = W + R parts

# Parts and features combined at a time by one program.
_PARTS_COMBINED, _FEATURES_COMBINED = 16, 128


def resident_programs(*, has_scales: bool) -> int:
    """Return the number of programs that a multiprocessor runs at once: four warps each, or one warp for codes."""
    return 8 if has_scales else 4


def launch_decode_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    query_groups: QueryGroups,
    rule: AttentionRule,
    splits: Splits,
    out_THD: Tensor,
) -> None:
    """Compute the attention of the queries of all groups, each to the keys up to its own; see AttentionRule.

    q, out: (T, H, D) bf16, fp16 or fp32; out is written at the groups' tokens only. codes, scales: a layer of the pool,
    quantized or of q's dtype; see KVPool. Queries of a group without keys get zeros. splits: Splits of the groups'
    contexts for the same rule; it affects rounding only. A NaN value spoils all queries of its group, also
    those that precede it.
    """
    groups, num_rows, num_programs = query_groups, len(query_groups.firsts_U), len(splits.rows_W)
    (_, num_heads, dim), (_, _, num_kv_heads, block_size, _) = q_THD.shape, codes_B2KSD.shape
    assert q_THD.stride(-1) == 1 and out_THD.is_contiguous() and groups.tables_UB.stride(-1) == 1
    # X = Q H: all heads of each query.
    shape = num_programs + num_rows, groups.most * num_heads
    part_PXD = torch.empty(*shape, dim, dtype=torch.float32, device=q_THD.device)
    largest_PX, total_PX = torch.empty(2, *shape, dtype=torch.float32, device=q_THD.device)
    group, has_scales, is_int4 = num_heads // num_kv_heads, scales_B2KS is not None, codes_B2KSD.dtype == INT4
    block_m, block_d = max(TILE_ROWS, power_of_2(groups.most * group)), max(TILE_ROWS, power_of_2(dim))
    codes = pairs = scales = as_bytes(codes_B2KSD)
    # More keys of wide heads would not fit the memory of as many programs. With three stages a multiprocessor would
    # hold three programs instead of four.
    options = {"BLOCK_N": KEYS if block_d <= 128 else KEYS // 2, "num_warps": 4, "num_stages": 2}
    if scales_B2KS is not None:
        pairs = codes if is_int4 else codes.view(torch.int16)
        scales = scales_B2KS.view(torch.int32) if block_size % 2 == 0 else scales_B2KS
        # One warp needs no barriers; registers limit how many run side by side.
        is_small = block_m == TILE_ROWS and block_d <= 128
        options = {"BLOCK_N": 32, "num_warps": 1 if is_small else 4, "num_stages": 4 if is_small else 3}
    _attend_part[(num_programs, num_kv_heads)](
        q_THD,
        codes,
        pairs,
        scales,
        groups.firsts_U,
        groups.counts_U,
        groups.tables_UB,
        groups.contexts_U,
        splits.starts_R,
        splits.rows_W,
        part_PXD,
        largest_PX,
        total_PX,
        num_rows,
        rule.factor,
        q_THD.stride(0),
        q_THD.stride(1),
        groups.tables_UB.stride(0),
        Q=groups.most,
        G=group,
        K=num_kv_heads,
        S=block_size,
        D=dim,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        **rule.constants,
        SHARED_N=KEYS,
        HAS_SCALES=has_scales,
        IS_INT4=is_int4,
        NATIVE=has_scales and has_fp8_casts(q_THD.device),
        **options,
    )
    # int4 results are turned back as whole rows.
    block_d = power_of_2(dim) if is_int4 else min(_FEATURES_COMBINED, power_of_2(dim))
    _combine_parts[(len(groups.tokens_N), num_heads, cdiv(dim, block_d))](
        part_PXD,
        largest_PX,
        total_PX,
        splits.starts_R,
        groups.tokens_N,
        groups.seats_N,
        rule.sinks_H,
        out_THD,
        num_rows,
        Q=groups.most,
        H=num_heads,
        D=dim,
        BLOCK_P=_PARTS_COMBINED,
        BLOCK_D=block_d,
        IS_INT4=is_int4,
    )


@partial(jit, do_not_specialize=["num_rows", "table_stride"])
def _attend_part(
    q: tl.tensor,
    codes: tl.tensor,
    pairs: tl.tensor,
    scales: tl.tensor,
    firsts: tl.tensor,
    counts: tl.tensor,
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
    Q: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SHARED_N: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_INT4: tl.constexpr,
    NATIVE: tl.constexpr,
) -> None:
    """One program: up to Q times G queries of a group and KV head, over its share of the keys of one or more groups."""
    program, head = tl.program_id(0), tl.program_id(1)
    share = tl.load(starts + num_rows + 1)
    place = program * share
    stop = tl.minimum(place + share, tl.load(starts + num_rows))
    row = tl.load(rows + program)
    m, d, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    query, of_head = m // G, m % G
    while place < stop:
        context, num_queries = tl.load(contexts + row), tl.load(counts + row)
        skipped, num_blocks = blocks_of(context, Q, WINDOW, CHUNK, SHARED_N)
        before = place - tl.load(starts + row)
        taken = tl.minimum(num_blocks - before, stop - place)
        first = (skipped + before) * SHARED_N
        end = tl.minimum(first + taken * SHARED_N, context)
        token = tl.load(firsts + row).to(tl.int64) + query
        is_query = (m < Q * G) & (query < num_queries)
        mask = is_query[:, None] & (d < D)[None, :]
        place_of_q = token * q_token_stride + (head * G + of_head) * q_head_stride
        queries = tl.load(q + place_of_q[:, None] + d[None, :], mask=mask, other=0.0)
        if IS_INT4:
            queries = rotate_queries(queries.to(tl.float32), D).to(queries.dtype)
        # Number of keys that each query sees.
        sees = context - num_queries + 1 + query
        # Blocks before the first key that any of them sees may be another sequence's; see KVPool.window_of.
        lowest = context * 0
        if WINDOW > 0:
            lowest = context - num_queries - (WINDOW - 1)
        elif CHUNK > 0:
            lowest = (context - num_queries) // CHUNK * CHUNK
        table = tables + row.to(tl.int64) * table_stride
        at = (((program + row).to(tl.int64) * Q + query) * K + head) * G + of_head
        if HAS_SCALES:
            even, odd, largest, total = _attend_codes(
                queries, codes, pairs, scales, table, head, first, end, lowest, sees, scale,
                Q, K, S, D, BLOCK_M, BLOCK_D, BLOCK_N, WINDOW, CHUNK, CAP, IS_INT4, NATIVE,
            )  # fmt: skip
            if IS_INT4:
                if taken > 0:
                    tl.store(part + at[:, None] * D + d[None, :], even, mask=mask)
            elif taken > 0:
                target = part + at[:, None] * D + 2 * e[None, :]
                mask_e = is_query[:, None] & (e < D // 2)[None, :]
                tl.store(target, even, mask=mask_e)
                tl.store(target + 1, odd, mask=mask_e)
        else:
            out, largest, total = _attend_numbers(
                queries, codes, table, head, first, end, lowest, sees, scale,
                Q, K, S, D, BLOCK_M, BLOCK_D, BLOCK_N, WINDOW, CHUNK, CAP,
            )  # fmt: skip
            if taken > 0:
                tl.store(part + at[:, None] * D + d[None, :], out, mask=mask)
        if taken > 0:
            tl.store(largest_out + at, largest, mask=is_query)
            tl.store(total_out + at, total, mask=is_query)
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
    lowest: tl.tensor,
    sees: tl.tensor,
    scale: tl.tensor,
    Q: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to keys [first, end) of a row in q's dtype, from `lowest` on if there is a window.

    Returns out (M, D), largest (M), total (M); see online_softmax.py.
    """
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    d = tl.arange(0, BLOCK_D)
    for n in range(first, end, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        is_key, is_d = key < end, d < D
        if WINDOW + CHUNK > 0:
            is_key = is_key & (key >= lowest)
        cell, slot = places_of(n, S, BLOCK_N)
        block = tl.load(table + cell, mask=is_key, other=0).to(tl.int64) * (2 * K * S * D)
        within = (head * S + slot) * D
        k = tl.load(
            numbers + block[None, :] + (within[None, :] + d[:, None]), mask=is_key[None, :] & is_d[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        grown, fade, weights = _weigh(scores, largest, key, end, sees, Q, WINDOW, CHUNK, CAP)
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
    lowest: tl.tensor,
    sees: tl.tensor,
    scale: tl.tensor,
    Q: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
    IS_INT4: tl.constexpr,
    NATIVE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Attend to quantized keys, as _attend_numbers does.

    Returns even features of out (M, D / 2), odd ones, largest (M), total (M). int4: all features (M, D) in place of the
    even ones.
    """
    dtype: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
    q, power = _fit(q, dtype)
    scale *= power
    even = tl.zeros([BLOCK_M, BLOCK_D if IS_INT4 else BLOCK_D // 2], tl.float32)
    odd = tl.zeros([BLOCK_M, BLOCK_D // 2], tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Unit of the accumulated values: the largest scale so far, or 2^-120.
    unit = 7.52316384526264e-37
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    is_e = e < D // 2
    q_sum = tl.sum(q.to(tl.float32), axis=1) if IS_INT4 else total
    for n in range(first, end, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        is_key = key < end
        if WINDOW + CHUNK > 0:
            is_key = is_key & (key >= lowest)
        cell, slot = places_of(n, S, BLOCK_N)
        block = tl.load(table + cell, mask=is_key, other=0).to(tl.int64) * (2 * K * S)
        within = head * S + slot
        if IS_INT4:
            k_scale, k_zero = scale_and_zero(tl.load(scales + (block + within), mask=is_key, other=0))
            v_scale, v_zero = scale_and_zero(tl.load(scales + (block + within + K * S), mask=is_key, other=0))
            k = tl.load(
                codes + (block * (D // 2))[None, :] + (within[None, :] * (D // 2) + e[:, None]),
                mask=is_key[None, :] & is_e[:, None],
                other=0,
            )
            scores = tl.dot(q, nibbles_in_rows(k, dtype), input_precision="ieee")
            scores = scores * (k_scale * scale)[None, :] + q_sum[:, None] * (k_zero * scale)[None, :]
        else:
            k_scale = _scales_of(scales, table, head * S, n, end, K, S, BLOCK_N)
            v_scale = _scales_of(scales, table, (head + K) * S, n, end, K, S, BLOCK_N)
            if WINDOW + CHUNK > 0:
                v_scale = tl.where(is_key, v_scale, 0.0)
            k = tl.load(
                codes + (block * D)[None, :] + (within[None, :] * D + d[:, None]),
                mask=is_key[None, :] & (d < D)[:, None],
                other=0,
            )
            scores = tl.dot(q, from_code(k, dtype, NATIVE), input_precision="ieee")
            scores *= (k_scale * scale)[None, :]
        grown, fade, weights = _weigh(scores, largest, key, end, sees, Q, WINDOW, CHUNK, CAP)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(
            pairs + (block * (D // 2))[:, None] + ((within + K * S)[:, None] * (D // 2) + e[None, :]),
            mask=is_key[:, None] & is_e[None, :],
            other=0,
        )
        # In a unit of this size a zero stays within the range of fp32.
        size = tl.maximum(v_scale, tl.abs(v_zero) * 0.0009765625) if IS_INT4 else v_scale
        wider = tl.maximum(unit, tl.max(size, axis=0))
        fade *= unit / wider
        even *= fade[:, None]
        if IS_INT4:
            even += tl.sum(weights * (v_zero * (1.0 / wider))[None, :], axis=1)[:, None]
        weights = (weights * (v_scale * (1.0 / wider))[None, :]).to(dtype)
        if IS_INT4:
            even = tl.dot(weights, nibbles_in_columns(v, dtype), even, input_precision="ieee")
        else:
            v_even, v_odd = from_codes(v, codes.dtype.element_ty == tl.int8, dtype, NATIVE)
            even = tl.dot(weights, v_even, even, input_precision="ieee")
            odd = tl.dot(weights, v_odd, odd * fade[:, None], input_precision="ieee")
        largest, unit = grown, wider
    return even * unit, odd * unit, largest, total


@jit
def _weigh(
    scores: tl.tensor,
    largest: tl.tensor,
    key: tl.tensor,
    end: tl.tensor,
    sees: tl.tensor,
    Q: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the new largest score, the factor for earlier results, and the weights of these keys."""
    if CAP > 0.0:
        scores = capped(scores, CAP)
    is_seen = (key < end)[None, :]
    if Q > 1:
        is_seen = is_seen & (key[None, :] < sees[:, None])
    if WINDOW + CHUNK > 0:
        is_seen = is_seen & is_in_reach(key[None, :], sees[:, None] - 1, WINDOW, CHUNK)
    scores = tl.where(is_seen, scores, -float("inf"))
    grown = tl.maximum(largest, tl.max(scores, axis=1))
    base = grown
    if Q > 1 or WINDOW + CHUNK > 0:
        # A query may see none of these keys.
        base = tl.where(grown == -float("inf"), 0.0, grown)
    return grown, tl.exp2(largest - base), tl.exp2(scores - base[:, None])


@jit
def _fit(q: tl.tensor, dtype: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Convert queries (M, D) to `dtype`, divided by a power of two so that bf16 fits fp16. Returns both."""
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
    """Load the scales of keys n, n + 1, … as fp32 (BLOCK_N). `place`: their offset in a block. Zero from `end` on.

    Two are read at once if given as int32, because asynchronous copies to shared memory need at least 4 bytes.
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
    seats: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    Q: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INT4: tl.constexpr,
) -> None:
    """One program: BLOCK_D features of one head of one query, BLOCK_P parts at a time."""
    number, head = tl.program_id(0), tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    token, seat = tl.load(tokens + number).to(tl.int64), tl.load(seats + number)
    row, query = seat // Q, seat % Q
    sink = None if sinks is None else sink_of(sinks, head)
    whole = whole_of_parts(part, largest, total, starts, row, query * H + head, sink, d, num_rows, Q * H, D, BLOCK_P)
    if IS_INT4:
        whole = tl.reshape(unrotate_tile(tl.reshape(whole, [1, BLOCK_D]), D), [BLOCK_D])
    tl.store(out + (token * H + head) * D + d, whole.to(out.dtype.element_ty), mask=d < D)


@jit
def whole_of_parts(
    part: tl.tensor,
    largest_in: tl.tensor,
    total_in: tl.tensor,
    starts: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    sink: tl.tensor,
    d: tl.tensor,
    num_rows: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> tl.tensor:
    """Combine the features `d` of one row's head from its parts, BLOCK_P at a time; zeros for a row without keys.

    sink: one more score, in base 2, or None.
    """
    share = tl.load(starts + num_rows + 1)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    # Range of programs; empty for a row without keys.
    first, last = begin // share, (end + share - 1) // share
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
    if sink is not None:
        grown = tl.maximum(base, sink)
        total = total * tl.exp2(base - grown) + tl.exp2(sink - grown)
        result *= tl.exp2(base - grown)
    return result / tl.where(total == 0.0, 1.0, total)
