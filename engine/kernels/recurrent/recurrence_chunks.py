"""Triton kernels of engine.kernels.recurrent.linear_recurrence.

`advance_runs` computes short sequences token by token, long ones take chunks of 64 tokens. The inverse of a chunk's
triangular system does not depend on the state, so `invert_chunks` computes those of all chunks in parallel. Then
`advance_chunks` passes each sequence's state through its chunks.
"""

from __future__ import annotations

from functools import partial

from engine.kernels.language import jit, tl

# H heads, K key features, V value features, B tokens of a chunk. Constant strides take no registers.

_SIZES = ["dt_stride", "beta_stride", "slot_stride"]


@jit
def _place(
    states: tl.tensor,
    slot: tl.tensor,
    slot_stride: tl.tensor,
    head: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
) -> tl.tensor:
    """Return pointers to columns v of a head's state: (k, v)."""
    return (states + slot * slot_stride + head * (K * V)) + (k[:, None] * V + v[None, :])


@jit
def _mask(slot: tl.tensor, k: tl.tensor, v: tl.tensor, K: tl.constexpr, V: tl.constexpr) -> tl.tensor:
    """Return the mask of a head's state, (k, v); all false if the slot is -1."""
    return (k < tl.where(slot >= 0, K, 0))[:, None] & (v < V)[None, :]


@jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """Compute log(1 + e^x), exactly for small e^x too."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0)))


@jit
def _gates(
    dt: tl.tensor,
    beta: tl.tensor,
    rate: tl.tensor,
    dt_bias: tl.tensor,
    min_dt: tl.tensor,
    max_dt: tl.tensor,
    mask: tl.tensor,
    IS_DELTA: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load gates of tokens. Returns logarithms of decays, and beta or dt; both zero where masked."""
    step = _softplus(tl.load(dt, mask=mask, other=0.0).to(tl.float32) + dt_bias)
    if IS_DELTA:
        b = tl.load(beta, mask=mask, other=0.0).to(tl.float32)
        factor = (1.0 / (1.0 + tl.exp(-b))).to(beta.dtype.element_ty).to(tl.float32)
    else:
        step = tl.minimum(tl.maximum(step, min_dt), max_dt)
        factor = step
    return tl.where(mask, -rate * step, 0.0), tl.where(mask, factor, 0.0)


@jit
def _unit(x: tl.tensor) -> tl.tensor:
    """Scale the last dimension to unit length."""
    return x * tl.expand_dims(1.0 / tl.sqrt(tl.sum(x * x, axis=-1) + 1e-6), -1)


@jit
def _sums(log_decays: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return cumulative sums as two numbers each, the first exact, so that differences of large sums stay exact."""
    log_decays = tl.maximum(log_decays, -100.0)
    coarse = tl.floor(log_decays * 2048.0) * (1.0 / 2048.0)
    return tl.cumsum(coarse, axis=0), tl.cumsum(log_decays - coarse, axis=0)


@jit
def _decays_between(coarse: tl.tensor, fine: tl.tensor, B: tl.constexpr) -> tl.tensor:
    """Return the decay from the end of token j to that of token i, (i, j); zero for later j."""
    i = tl.arange(0, B)
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    is_past = i[:, None] >= i[None, :]
    return tl.where(is_past, tl.exp(tl.where(is_past, between, 0.0)), 0.0)


@partial(jit, do_not_specialize=_SIZES)
def advance_runs(
    rows: tl.tensor,
    dt: tl.tensor,
    beta: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
    skips: tl.tensor,
    out: tl.tensor,
    states: tl.tensor,
    starts: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    dt_stride: tl.tensor,
    beta_stride: tl.tensor,
    slot_stride: tl.tensor,
    min_dt: tl.tensor,
    max_dt: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    IS_DELTA: tl.constexpr,
    MAX_RUN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program: BLOCK_V columns of one head, for one sequence of MAX_RUN tokens at most."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    if count > MAX_RUN:
        return
    k, v = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    read = tl.load(reads + sequence)
    state = tl.load(_place(states, read, slot_stride, head, k, v, K, V), mask=_mask(read, k, v, K, V), other=0.0)
    rate, bias = tl.load(rates + head), tl.load(dt_bias + head)
    for token in range(first, first + count):
        row = rows + token * ROW
        key_place = head // HEADS_PER_KEY * K + k
        key = tl.load(row + KEYS + key_place, mask=k < K, other=0.0).to(tl.float32)
        query = tl.load(row + QUERIES + key_place, mask=k < K, other=0.0).to(tl.float32)
        value = tl.load(row + VALUES + head * V + v, mask=v < V, other=0.0).to(tl.float32)
        dt_place, beta_place = dt + token * dt_stride + head, beta + token * beta_stride + head
        log_decay, factor = _gates(dt_place, beta_place, rate, bias, min_dt, max_dt, token >= 0, IS_DELTA)
        state = state * tl.exp(log_decay)
        change = value
        if IS_DELTA:
            key, query = _unit(key), _unit(query) * (K**-0.5)
            change = value - tl.sum(state * key[:, None], axis=0)
        state += key[:, None] * (factor * change)[None, :]
        result = tl.sum(state * query[:, None], axis=0)
        if skips is not None:
            result += tl.load(skips + head) * value
        tl.store(out + (token * HEADS + head) * V + v, result.to(out.dtype.element_ty), mask=v < V)
        write = tl.load(writes + token)
        tl.store(_place(states, write, slot_stride, head, k, v, K, V), state, mask=_mask(write, k, v, K, V))


@partial(jit, do_not_specialize=_SIZES)
def invert_chunks(
    rows: tl.tensor,
    dt: tl.tensor,
    beta: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
    inverses: tl.tensor,
    starts: tl.tensor,
    dt_stride: tl.tensor,
    beta_stride: tl.tensor,
    KEYS: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    MAX_RUN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """One program: one head's chunk. Writes the inverse of its unit lower triangular system: (T, H, B)."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    begin = tl.program_id(0) * B
    if (count <= MAX_RUN) | (begin >= count):
        return
    i, k = tl.arange(0, B), tl.arange(0, BLOCK_K)
    token, is_token = first + begin, begin + i < count
    rate, bias = tl.load(rates + head), tl.load(dt_bias + head)
    dt_place = dt + token * dt_stride + head + i * dt_stride
    beta_place = beta + token * beta_stride + head + i * beta_stride
    log_decays, factor = _gates(dt_place, beta_place, rate, bias, 0.0, 0.0, is_token, True)
    coarse, fine = _sums(log_decays)
    place = i[:, None] * ROW + k[None, :]
    row = rows + token * ROW + KEYS + head // HEADS_PER_KEY * K
    key = _unit(tl.load(row + place, mask=is_token[:, None] & (k < K)[None, :], other=0.0).to(tl.float32))
    key = key.to(rows.dtype.element_ty)
    system = tl.dot(key, tl.trans(key), input_precision=PRECISION) * _decays_between(coarse, fine, B) * factor[:, None]
    system = tl.where(i[:, None] > i[None, :], system, 0.0)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, B):
        weights = tl.sum(tl.where((i == row)[:, None], system, 0.0), axis=0)
        change = tl.sum(weights[:, None] * inverse, axis=0)
        inverse = tl.where((i == row)[:, None], inverse - change[None, :], inverse)
    place = inverses + (token * HEADS + head) * B + (i[:, None] * (HEADS * B) + i[None, :])
    tl.store(place, inverse.to(inverses.dtype.element_ty), mask=is_token[:, None])


@partial(jit, do_not_specialize=_SIZES)
def advance_chunks(
    rows: tl.tensor,
    dt: tl.tensor,
    beta: tl.tensor,
    rates: tl.tensor,
    dt_bias: tl.tensor,
    skips: tl.tensor,
    inverses: tl.tensor,
    out: tl.tensor,
    states: tl.tensor,
    starts: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    dt_stride: tl.tensor,
    beta_stride: tl.tensor,
    slot_stride: tl.tensor,
    min_dt: tl.tensor,
    max_dt: tl.tensor,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROW: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_KEY: tl.constexpr,
    IS_DELTA: tl.constexpr,
    MAX_RUN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    B: tl.constexpr,
) -> None:
    """One program: BLOCK_V columns of one head, for one sequence of more than MAX_RUN tokens."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    if end - first <= MAX_RUN:
        return
    # Operands of products are rounded to it; sums and the state stay fp32.
    dtype = rows.dtype.element_ty
    i, k = tl.arange(0, B), tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    read = tl.load(reads + sequence)
    state = tl.load(_place(states, read, slot_stride, head, k, v, K, V), mask=_mask(read, k, v, K, V), other=0.0)
    rate, bias = tl.load(rates + head), tl.load(dt_bias + head)
    for begin in range(first, end, B):
        is_token = begin + i < end
        last = tl.minimum(end - begin, B) - 1
        dt_place = dt + begin * dt_stride + head + i * dt_stride
        beta_place = beta + begin * beta_stride + head + i * beta_stride
        log_decays, factor = _gates(dt_place, beta_place, rate, bias, min_dt, max_dt, is_token, IS_DELTA)
        coarse, fine = _sums(log_decays)
        past = tl.exp(coarse + fine)
        row = rows + begin * ROW + head // HEADS_PER_KEY * K
        key_mask, value_mask = is_token[:, None] & (k < K)[None, :], is_token[:, None] & (v < V)[None, :]
        key_place, value_place = i[:, None] * ROW + k[None, :], i[:, None] * ROW + v[None, :]
        key = tl.load(row + KEYS + key_place, mask=key_mask, other=0.0)
        values = rows + begin * ROW + VALUES + head * V
        change = factor[:, None] * tl.load(values + value_place, mask=value_mask, other=0.0).to(tl.float32)
        if IS_DELTA:
            key = _unit(key.to(tl.float32)).to(dtype)
            change -= (factor * past)[:, None] * tl.dot(key, state.to(dtype), input_precision=PRECISION)
            inverse_place = inverses + (begin * HEADS + head) * B + (i[:, None] * (HEADS * B) + i[None, :])
            inverse = tl.load(inverse_place, mask=is_token[:, None], other=0.0)
            change = tl.dot(inverse, change.to(dtype), input_precision=PRECISION)
        query = tl.load(row + QUERIES + key_place, mask=key_mask, other=0.0)
        if IS_DELTA:
            query = (_unit(query.to(tl.float32)) * (K**-0.5)).to(dtype)
        result = past[:, None] * tl.dot(query, state.to(dtype), input_precision=PRECISION)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * _decays_between(coarse, fine, B)
        result += tl.dot(scores.to(dtype), change.to(dtype), input_precision=PRECISION)
        if skips is not None:
            value = tl.load(values + value_place, mask=value_mask, other=0.0).to(tl.float32)
            result += tl.load(skips + head) * value
        out_place = out + (begin * HEADS + head) * V + (i[:, None] * (HEADS * V) + v[None, :])
        tl.store(out_place, result.to(out.dtype.element_ty), mask=value_mask)
        # Compute and write the state after each token with a slot, then the one after the last token.
        write = tl.load(writes + begin + i, mask=is_token, other=-1)
        kept = tl.where((write >= 0) | (i == last), i, B)
        at = tl.min(kept, axis=0)
        before = state
        while at < B:
            coarse_at = tl.sum(tl.where(i == at, coarse, 0.0), axis=0)
            fine_at = tl.sum(tl.where(i == at, fine, 0.0), axis=0)
            slot = tl.sum(tl.where(i == at, write, 0), axis=0)
            is_past = i <= at
            rest = tl.where(is_past, tl.exp(tl.where(is_past, (coarse_at - coarse) + (fine_at - fine), 0.0)), 0.0)
            state = tl.exp(coarse_at + fine_at) * before
            state += tl.dot(tl.trans(key), (rest[:, None] * change).to(dtype), input_precision=PRECISION)
            tl.store(_place(states, slot, slot_stride, head, k, v, K, V), state, mask=_mask(slot, k, v, K, V))
            kept = tl.where(i == at, B, kept)
            at = tl.min(kept, axis=0)
