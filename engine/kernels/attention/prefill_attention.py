"""Paged prefill attention: a prompt, or a chunk of one after a cached prefix.

Queries are cut into tiles (queries.py). For few queries over many keys, a tile's keys are split among programs too.
Reads the pool's blocks in place; keys seen by many queries are gathered first, see dense_prefill.py.

On an A100 and for wide heads, matrix operands come from registers, and 8-bit values would be loaded byte by byte. There
they are read two features at a time as int16 and split in registers. Devices with operands in shared memory need fewer
instructions when reading single codes. int4 codes are widened in registers everywhere; see decode_attention.py.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.attention.attention_rule import AttentionRule, sink_of
from engine.kernels.attention.online_softmax import attend_block
from engine.kernels.attention.queries import TILE_QUERIES, QueryTiles
from engine.kernels.language import cdiv, has_fp8_casts, has_tile_copies, jit, power_of_2, tl
from engine.kernels.quant.hadamard import rotate_queries, unrotate_tile
from engine.kernels.quant.row_quantization import INT4, as_bytes

# T tokens of the step, R rows, H query heads, K kv heads, G = H / K, D head_dim, B blocks, S block_size, N tiles,
# P splits of a tile's keys

# Keys per loop iteration; half as many where codes are widened into operands in registers.
_KEYS = 64
# Above this head_dim, tiles are too small for products with operands in shared memory.
_WIDE = 256
_PROGRAMS_PER_PROCESSOR = 2
_MIN_KEYS_PER_SPLIT = 512


class Tile(NamedTuple):
    """Queries and keys of a loop iteration of one program, and its warps."""

    # A divisor of TILE_QUERIES.
    queries: int
    keys: int
    num_warps: int

    @classmethod
    def of(cls, dim: int, device: torch.device, *, is_int4: bool, at_once: int) -> Tile:
        """Choose the largest tile whose registers do not spill, for heads of `dim`; see compiled_attention.py."""
        if dim > _WIDE:
            return cls(16, 32, 8 if is_int4 else 4)
        if dim > 128:
            if has_tile_copies(device):
                return cls(TILE_QUERIES, 32, 8 if is_int4 else 4)
            return cls(16, 32, 4) if is_int4 else cls(TILE_QUERIES, 32, 4 * at_once)
        # Four warps would spill the widened codes if operands come from registers.
        return cls(TILE_QUERIES, _KEYS // at_once, 8 if is_int4 and at_once == 2 else 4)


def launch_prefill_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    tiles: QueryTiles,
    tables_RB: Tensor,
    contexts_R: Tensor,
    rule: AttentionRule,
    out_THD: Tensor,
    num_splits: int | None = None,
    codes_at_once: int | None = None,
    tile: Tile | None = None,
) -> None:
    """Compute the attention of each row's queries, its last positions, to keys up to their own; see AttentionRule.

    q, out: (T, H, D) bf16, fp16 or fp32; out is written at the tiles' queries only. codes, scales: a layer of the pool,
    quantized or of q's dtype; see KVPool. tables: (R, B) int32 block ids; contexts: (R,) int32 keys, including those of
    the queries. num_splits, codes_at_once (1 or 2) and tile override the chosen values, for tests.
    """
    _, num_heads, dim = q_THD.shape
    _, _, num_kv_heads, block_size, _ = codes_B2KSD.shape
    has_scales, is_int4 = scales_B2KS is not None, codes_B2KSD.dtype == INT4
    assert q_THD.stride(-1) == 1 and out_THD.is_contiguous() and tables_RB.stride(-1) == 1
    reads_pairs = dim > _WIDE or not has_tile_copies(q_THD.device)
    at_once = (codes_at_once or 1 + reads_pairs) if has_scales else 1
    step = 1 if is_int4 else at_once
    num_tiles, block_d = len(tiles.rows_N), max(16 * step, power_of_2(dim))
    tile = tile or Tile.of(dim, q_THD.device, is_int4=is_int4, at_once=at_once)
    num_parts = num_tiles * (TILE_QUERIES // tile.queries)
    codes = as_bytes(codes_B2KSD)
    if num_splits is None:
        num_splits = _splits_for(num_parts * num_heads, tables_RB.shape[1] * block_size, q_THD.device)
    sums = [q_THD.new_empty(1, dtype=torch.float32)] * 3
    if num_splits > 1:
        shape = (num_tiles, num_heads, num_splits, TILE_QUERIES)
        part = torch.empty(*shape, dim, dtype=torch.float32, device=q_THD.device)
        sums = [part, *torch.empty(2, *shape, dtype=torch.float32, device=q_THD.device)]
    where = (tiles.rows_N, tiles.firsts_N, tiles.begins_R, tiles.lengths_R)
    _attend_tile[(num_parts, num_heads, num_splits)](
        q_THD,
        codes.view(torch.int16) if step == 2 else codes,
        scales_B2KS if has_scales else codes,
        *where,
        tables_RB,
        contexts_R,
        rule.sinks_H,
        out_THD,
        *sums,
        rule.factor,
        q_THD.stride(0),
        q_THD.stride(1),
        tables_RB.stride(0),
        H=num_heads,
        K=num_kv_heads,
        S=block_size,
        D=dim,
        TILE=TILE_QUERIES,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        BLOCK_D=block_d,
        **rule.constants,
        HAS_SCALES=has_scales,
        STEP=step,
        IS_INT8=codes.dtype == torch.int8,
        IS_INT4=is_int4,
        NATIVE=has_fp8_casts(q_THD.device),
        IN_PAIRS=q_THD.dtype == torch.bfloat16 and q_THD.is_cuda,
        num_warps=tile.num_warps,
        num_stages=2,
    )
    if num_splits > 1:
        sizes = {"H": num_heads, "D": dim, "BLOCK_M": TILE_QUERIES, "BLOCK_D": block_d, "IS_INT4": is_int4}
        # All features of a tile are in registers.
        num_warps = max(4, block_d // 32)
        _combine_splits[(num_tiles, num_heads)](*where, out_THD, *sums, num_splits, **sizes, num_warps=num_warps)


def _splits_for(num_programs: int, longest: int, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    target = torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_PROCESSOR // num_programs
    # Use at least two splits for few queries even if rows are short, so that warm-up compiles the split kernel.
    return min(target, max(2, cdiv(longest, _MIN_KEYS_PER_SPLIT))) if target > 1 else 1


@partial(jit, do_not_specialize=["table_stride"])
def _attend_tile(
    q: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    tile_rows: tl.tensor,
    tile_firsts: tl.tensor,
    begins: tl.tensor,
    lengths: tl.tensor,
    tables: tl.tensor,
    contexts: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    part: tl.tensor,
    part_largest: tl.tensor,
    part_total: tl.tensor,
    scale: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
) -> None:
    """One program: BLOCK_M queries of one row and one head, over one split of the keys that they see.

    keys   first ........ plain ........ end       [first, plain): seen by every query of the tile, no mask needed
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    within = 0
    if BLOCK_M < TILE:
        within = tile % (TILE // BLOCK_M) * BLOCK_M
        tile //= TILE // BLOCK_M
    row, first_query = tl.load(tile_rows + tile), tl.load(tile_firsts + tile)
    length, context = tl.load(lengths + row), tl.load(contexts + row)
    if BLOCK_M < TILE:
        first_query += within
        if first_query >= length:
            return
    m, d = first_query + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    first_position = context - length + first_query
    position = context - length + m
    token = (tl.load(begins + row) + m).to(tl.int64)
    mask = (m < length)[:, None] & (d < D)[None, :]
    queries = tl.load(q + token[:, None] * q_token_stride + head * q_head_stride + d[None, :], mask=mask, other=0.0)
    if IS_INT4:
        queries = rotate_queries(queries.to(tl.float32), D).to(queries.dtype)

    end = tl.minimum(context, first_position + BLOCK_M)
    first = context * 0
    plain = (first_position + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        plain = first
    elif CHUNK > 0:
        first = first_position // CHUNK * CHUNK // BLOCK_N * BLOCK_N
        # Later queries of a tile may begin another chunk.
        is_one = (end - 1) // CHUNK == first_position // CHUNK
        plain = tl.where(is_one & (CHUNK % BLOCK_N == 0), plain, first)
    share = tl.cdiv(tl.cdiv(end - first, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    first += split * share
    end = tl.minimum(end, first + share)
    plain = tl.maximum(first, tl.minimum(plain, end))
    table = tables + row.to(tl.int64) * table_stride
    kv_head = head // (H // K)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if sinks is not None:
        # Sinks count in the first split only.
        largest = tl.where(split == 0, sink_of(sinks, head), largest)
        total = tl.where(split == 0, 1.0, total)
    q_odd = queries
    if STEP == 2:
        queries, q_odd = tl.split(tl.reshape(queries, [BLOCK_M, BLOCK_D // 2, 2]))
    result = tl.zeros([BLOCK_M, BLOCK_D // STEP], tl.float32)
    odd = result
    # A window leaves this loop without iterations, but it would still be compiled.
    if WINDOW == 0:
        for n in range(first, plain, BLOCK_N):
            result, odd, largest, total = attend_block(
                result, odd, largest, total, queries, q_odd, position, n, end, numbers, scales, table, kv_head, scale,
                K, S, D // STEP, BLOCK_N, BLOCK_D // STEP, WINDOW, CHUNK, CAP, HAS_SCALES, STEP, IS_INT8, IS_INT4,
                NATIVE, IN_PAIRS, False,
            )  # fmt: skip
    for n in range(plain, end, BLOCK_N):
        result, odd, largest, total = attend_block(
            result, odd, largest, total, queries, q_odd, position, n, end, numbers, scales, table, kv_head, scale,
            K, S, D // STEP, BLOCK_N, BLOCK_D // STEP, WINDOW, CHUNK, CAP, HAS_SCALES, STEP, IS_INT8, IS_INT4, NATIVE,
            IN_PAIRS, True,
        )  # fmt: skip
    if STEP == 2:
        result = tl.reshape(tl.join(result, odd), [BLOCK_M, BLOCK_D])
    if tl.num_programs(2) > 1:
        in_parts = ((tile.to(tl.int64) * H + head) * tl.num_programs(2) + split) * TILE + within + tl.arange(0, BLOCK_M)
        tl.store(part + in_parts[:, None] * D + d[None, :], result, mask=mask)
        tl.store(part_largest + in_parts, largest)
        tl.store(part_total + in_parts, total)
    else:
        # Positions past the row's last query may see no keys.
        total = tl.where(total == 0.0, 1.0, total)
        place = (token[:, None] * H + head) * D + d[None, :]
        result /= total[:, None]
        if IS_INT4:
            result = unrotate_tile(tl.where((d < D)[None, :], result, 0.0), D)
        tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@partial(jit, do_not_specialize=["num_splits"])
def _combine_splits(
    tile_rows: tl.tensor,
    tile_firsts: tl.tensor,
    begins: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    part: tl.tensor,
    part_largest: tl.tensor,
    part_total: tl.tensor,
    num_splits: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INT4: tl.constexpr,
) -> None:
    """One program: one tile of one head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row, first_query = tl.load(tile_rows + tile), tl.load(tile_firsts + tile)
    i, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    m = first_query + i
    is_query = m < tl.load(lengths + row)  # nothing was written for the others
    mask = is_query[:, None] & (d < D)[None, :]
    base = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(num_splits):
        place = ((tile.to(tl.int64) * H + head) * num_splits + split) * BLOCK_M + i
        largest = tl.load(part_largest + place, mask=is_query, other=-float("inf"))
        grown = tl.maximum(base, largest)
        fade, weight = tl.exp2(base - grown), tl.exp2(largest - grown)
        total = total * fade + tl.load(part_total + place, mask=is_query, other=0.0) * weight
        numbers = tl.load(part + place[:, None] * D + d[None, :], mask=mask, other=0.0)
        result = result * fade[:, None] + numbers * weight[:, None]
        base = grown
    total = tl.where(total == 0.0, 1.0, total)
    token = (tl.load(begins + row) + m).to(tl.int64)
    target = out + (token[:, None] * H + head) * D + d[None, :]
    result /= total[:, None]
    if IS_INT4:
        result = unrotate_tile(result, D)
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
