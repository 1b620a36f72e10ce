"""Shared parts of the attention kernels: one step of an online softmax over paged keys.

For a block of keys k_j and values v_j, with m the largest score so far (Milakov and Gimelshein 2018, arXiv:1805.02867):

    s_j = scale q k_j          m' = max(m, max s_j)      l' = l e^(m - m') + sum e^(s_j - m')
                               o' = o e^(m - m') + sum e^(s_j - m') v_j                             out = o / l

Quantized pools are not dequantized: codes are exact in fp16 and bf16, so a key's scale multiplies its scores and a
value's scale its weights. int4: see decode_attention.py.
"""

from __future__ import annotations

from engine.kernels.attention.attention_rule import capped, is_in_reach
from engine.kernels.language import jit, tl
from engine.kernels.quant.code_words import widen
from engine.kernels.quant.row_quantization import (
    from_code,
    from_codes,
    nibbles_in_columns,
    nibbles_in_rows,
    scale_and_zero,
)

# M queries (or heads of one query), N keys, L keys of a row, B blocks, K kv heads, S block_size, D head_dim


@jit
def places_of(first: tl.tensor, S: tl.constexpr, BLOCK_N: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the table cell and the offset in the block of each key in [first, first + BLOCK_N).

    Terms that do not depend on `first` stay out of the loop. first: a multiple of BLOCK_N.
    """
    i = tl.arange(0, BLOCK_N)
    if BLOCK_N % S == 0:
        return first // S + i // S, i % S
    return (first + i) // S, (first + i) % S


@jit
def weigh(
    scores: tl.tensor,
    largest: tl.tensor,
    is_seen: tl.tensor,
    scale: tl.tensor,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Weigh further keys by their scores (M, N).

    Returns the largest score so far (M), the factor for earlier results (M), and the weights (M, N). scale: positive
    factor of the scores. CAP: see AttentionRule; 0: none. MASKED: some keys are hidden.
    """
    if CAP > 0.0:
        scores = capped(scores * scale, CAP)
        scale = 1.0
    if MASKED:
        scores = tl.where(is_seen, scores, -float("inf"))
    grown = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    base = grown
    if MASKED:
        # A query may not have seen a key yet.
        base = tl.where(grown == -float("inf"), 0.0, grown)
    # The product and the difference are fused.
    return grown, tl.exp2(largest - base), tl.exp2(scores * scale - base[:, None])


@jit
def attend_block(
    out: tl.tensor,
    odd: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    q: tl.tensor,
    q_odd: tl.tensor,
    position: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    table: tl.tensor,
    head: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    STEP: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_INT4: tl.constexpr,
    NATIVE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Accumulate keys [first, first + BLOCK_N) of a row into out (M, D), odd, largest (M), total (M), and return them.

    q: (M, D). position: (M), of each query. end: number of existing keys. table: pointer to the row's block ids. scale,
    WINDOW, CHUNK, CAP: see AttentionRule. MASKED: some key may be hidden from some query.

    STEP: 1, or 2 for 8-bit codes. With 2, D counts pairs, each an int16 of `numbers`; q and out hold the even features,
    q_odd and odd the odd ones, which are unused otherwise. NATIVE: see from_code; IN_PAIRS: see widen, STEP 2. IS_INT4:
    q is rotated, and so is out.
    """
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    is_d = d < D
    is_key = (n < end) if MASKED else tl.full([BLOCK_N], True, tl.int1)
    cell, slot = places_of(first, S, BLOCK_N)
    block = tl.load(table + cell, mask=is_key, other=0).to(tl.int64) * (2 * K * S)
    key = head * S + slot
    value = key + K * S

    # Numbers per row: bytes of int4.
    ROW: tl.constexpr = D // 2 if IS_INT4 else D
    if IS_INT4:
        d = tl.arange(0, BLOCK_D // 2)
        is_d = d < ROW
    k = tl.load(
        numbers + (block * ROW)[None, :] + (key[None, :] * ROW + d[:, None]),
        mask=is_key[None, :] & is_d[:, None],
        other=0,
    )
    if IS_INT4:
        k = nibbles_in_rows(k, q.dtype)
    elif STEP == 2:
        k, k_odd = _widened(k, IS_INT8, q.dtype, NATIVE, IN_PAIRS)
    elif HAS_SCALES:
        k = from_code(k, q.dtype, NATIVE)
    scores = tl.dot(q, k, input_precision="ieee")
    if STEP == 2:
        scores = tl.dot(q_odd, k_odd, scores, input_precision="ieee")
    if IS_INT4:
        k_scale, k_zero = scale_and_zero(tl.load(scales + (block + key), mask=is_key, other=0))
        q_sum = tl.sum(q.to(tl.float32), axis=1)
        scores = scores * (k_scale * scale)[None, :] + q_sum[:, None] * (k_zero * scale)[None, :]
        scale = 1.0
    elif HAS_SCALES:
        scores *= (tl.load(scales + (block + key), mask=is_key, other=0.0).to(tl.float32) * scale)[None, :]
        scale = 1.0
    is_seen = (n[None, :] <= position[:, None]) & is_key[None, :]
    if WINDOW + CHUNK > 0:
        is_seen = is_seen & is_in_reach(n[None, :], position[:, None], WINDOW, CHUNK)
    grown, fade, weights = weigh(scores, largest, is_seen, scale, CAP, MASKED)
    total = total * fade + tl.sum(weights, axis=1)

    v = tl.load(
        numbers + (block * ROW)[:, None] + (value[:, None] * ROW + d[None, :]),
        mask=is_key[:, None] & is_d[None, :],
        other=0,
    )
    out *= fade[:, None]
    if STEP == 2:
        odd *= fade[:, None]
        v, v_odd = _widened(v, IS_INT8, q.dtype, NATIVE, IN_PAIRS)
    elif IS_INT4:
        v = nibbles_in_columns(v, q.dtype)
    elif HAS_SCALES:
        v = from_code(v, q.dtype, NATIVE)
    if IS_INT4:
        v_scale, v_zero = scale_and_zero(tl.load(scales + (block + value), mask=is_key, other=0))
        out += tl.sum(weights * v_zero[None, :], axis=1)[:, None]
        weights *= v_scale[None, :]
    elif HAS_SCALES:
        weights *= tl.load(scales + (block + value), mask=is_key, other=0.0).to(tl.float32)[None, :]
    weights = weights.to(q.dtype)
    out = tl.dot(weights, v, out, input_precision="ieee")
    if STEP == 2:
        odd = tl.dot(weights, v_odd, odd, input_precision="ieee")
    return out, odd, grown, total


@jit
def _widened(
    pair: tl.tensor, IS_INT8: tl.constexpr, dtype: tl.constexpr, NATIVE: tl.constexpr, IN_PAIRS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    if IN_PAIRS:
        even, odd = widen(pair, pair, 0, 1 if IS_INT8 else 0, None, dtype, True)
    else:
        even, odd = from_codes(pair, IS_INT8, dtype, NATIVE)
    return even, odd
