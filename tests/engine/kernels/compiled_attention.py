"""Program: compiles the attention kernels for an absent GPU and prints the launches as JSON.

python -m tests.engine.kernels.compiled_attention 9.0 bf16 fp8/gemma2 stores/int8/gemma4 latents/128/fp8 sparse/64/bf16
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, NamedTuple

# ruff: isort: off
from tests.engine.kernels.absent_gpu import DEVICE, absent_gpu, ints, numbers

import torch
from torch import Tensor

from engine.attention.triton_heads import MOST_GATHERED_DIM
from engine.kernels.attention.attention_rule import AttentionRule
from engine.kernels.attention.best_positions import launch_best_slots
from engine.kernels.attention.decode_attention import launch_decode_attention, resident_programs
from engine.kernels.attention.dense_prefill import Carry, Slice, WHOLE, launch_dense_prefill_attention
from engine.kernels.attention.gather_rows import launch_gather_rows
from engine.kernels.attention.index_scores import RESIDENT, TILE_QUERIES, launch_index_scores
from engine.kernels.attention.latent_attention import launch_latent_decode_attention, splits_of_latents
from engine.kernels.attention.kv_write import launch_write_kv
from engine.kernels.attention.prefill_attention import launch_prefill_attention
from engine.kernels.attention.kv_splits import Splits
from engine.kernels.attention.queries import QueryGroups, most_queries
from engine.kernels.attention.queries import QueryTiles
from engine.kernels.attention.rotary import launch_rotate
from engine.kernels.attention.store_heads import HeadNorms, launch_store_heads
from engine.kernels.quant.row_quantization import INT4
# ruff: isort: on


class Heads(NamedTuple):
    """Query heads, KV heads, head_dim, and the rule of attention."""

    num_q: int
    num_kv: int
    dim: int
    changes: Mapping[str, Any] = MappingProxyType({})


HEADS = {
    "llama": Heads(32, 8, 128),
    # 20B
    "gpt_oss": Heads(64, 8, 64, {"window": 128, "sinks_H": None}),
    # Scout
    "llama4": Heads(40, 8, 128, {"chunk": 8192}),
    # 9B
    "gemma2": Heads(16, 8, 256, {"soft_cap": 50.0}),
    # 4B
    "gemma3": Heads(8, 4, 256, {"window": 1024}),
    # 31B, layers of full attention
    "gemma4": Heads(32, 4, 512),
}
_S = 16
# DeepSeek-V3.2
_INDEX, _TOP_K = 128, 2048
# DeepSeek-V2-Lite
_LATENT, _ROPE, _VALUE, _LATENT_HEADS = 512, 64, 128, 16
_ROWS, _CONTEXT, _QUERIES = 64, 8192, 2048
_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": INT4}


def main() -> None:
    capability = tuple(int(number) for number in sys.argv[1].split("."))
    for kind in sys.argv[2:]:
        with absent_gpu(capability) as launches:
            match kind.split("/"):
                case ["latents", num_heads, pool]:
                    attend_latents(_DTYPES[pool], int(num_heads))
                case ["sparse", num_heads, pool]:
                    choose_positions(_DTYPES[pool], int(num_heads))
                case ["stores", pool, family]:
                    store(_DTYPES[pool], HEADS[family])
                case [pool, *family]:
                    attend(_DTYPES[pool], HEADS[family[0] if family else "llama"])
        print(json.dumps({"case": kind, "launches": [asdict(launch) for launch in launches]}), flush=True)


def attend(pool_dtype: torch.dtype, heads: Heads) -> None:
    num_q, num_kv, dim, changes = heads
    if "sinks_H" in changes:
        changes = {**changes, "sinks_H": numbers(num_q).float()}
    contexts = ints(_ROWS)
    tables = ints(_ROWS, _CONTEXT // _S)
    is_wide = pool_dtype == torch.bfloat16
    codes, scales = pool_layer(pool_dtype, heads)
    q = numbers(_QUERIES, num_q, dim)
    rule = AttentionRule(scale=0.1, **changes)
    rows = {"tables_RB": tables, "contexts_R": contexts, "rule": rule}
    most = most_queries(num_q, num_kv)
    of_query_groups = (ints(_ROWS), ints(_ROWS), tables, contexts, ints(most * _ROWS), ints(most * _ROWS))
    launch_decode_attention(
        q,
        codes,
        scales,
        query_groups=QueryGroups.of(of_query_groups, most=most, longest=_CONTEXT),
        rule=rule,
        splits=Splits.of(
            contexts,
            window=rule.window,
            chunk=rule.chunk,
            most=most,
            num_heads=num_kv,
            longest=_CONTEXT,
            resident=resident_programs(has_scales=not is_wide),
        ),
        out_THD=torch.empty_like(q),
    )
    tiles = QueryTiles(*(ints(size) for size in (_QUERIES // 64, _QUERIES // 64, _ROWS, _ROWS)))
    for num_splits in (2,):
        launch_prefill_attention(
            q, codes, scales, tiles=tiles, **rows, out_THD=torch.empty_like(q), num_splits=num_splits
        )
    if rule.window is None and rule.chunk is None and dim <= MOST_GATHERED_DIM:
        k, v = launch_gather_rows(codes, scales, ints(_CONTEXT // _S), q.dtype)
        dense(q, k, None, v, tiles, WHOLE, rule)
    if heads is not HEADS["llama"]:
        return
    # Latents are dequantized before.
    if is_wide:
        carry = Carry.empty(_QUERIES, _LATENT_HEADS, _VALUE, DEVICE)
        for part in (WHOLE, Slice(_CONTEXT, 2 * _CONTEXT, is_last=False, carry=carry)):
            shape = (_CONTEXT, _LATENT_HEADS, _VALUE)
            query = numbers(_QUERIES, _LATENT_HEADS, _VALUE + _ROPE)
            dense(
                query,
                numbers(*shape),
                numbers(_CONTEXT, _LATENT + _ROPE)[:, _LATENT:],
                numbers(*shape),
                tiles,
                part,
                rule,
            )
    if pool_dtype != INT4:
        attend_latents(pool_dtype, _LATENT_HEADS)


def store(pool_dtype: torch.dtype, heads: Heads) -> None:
    """Store heads that are rotated as a whole, in part and not at all, with norms and without."""
    num_q, num_kv, dim, _ = heads
    pool, slots = pool_layer(pool_dtype, heads), ints(_ROWS)
    projected = numbers(_ROWS, num_q + 2 * num_kv, dim)
    weight = numbers(dim)
    for rotated, norms in (
        (dim, HeadNorms()),
        (dim, HeadNorms(weight, weight, weight, 1e-6)),
        (dim // 2, HeadNorms(weight, weight, None, 1e-6)),
        (0, HeadNorms()),
    ):
        angles = numbers(_ROWS, 1, rotated // 2), numbers(_ROWS, 1, rotated // 2)
        launch_store_heads(projected, *angles, *pool, slots, norms)
        # Layers that read another one's keys, and layers that are only kept.
        q, k, v = projected.tensor_split((num_q, num_q + num_kv), dim=1)
        launch_rotate(q, *angles)
        launch_rotate(k, *angles)
    launch_write_kv(*pool, slots, k, v)


def pool_layer(pool_dtype: torch.dtype, heads: Heads) -> tuple[Tensor, Tensor | None]:
    """Return a layer's codes (B, 2, K, S, D) and scales (B, 2, K, S)."""
    is_int4, shape = pool_dtype == INT4, (4096, 2, heads.num_kv, _S)
    codes = torch.empty(*shape, heads.dim // 2 if is_int4 else heads.dim, dtype=pool_dtype, device=DEVICE)
    if pool_dtype == torch.bfloat16:
        return codes, None
    return codes, ints(*shape) if is_int4 else numbers(*shape)


def latent_layer(pool_dtype: torch.dtype, size: int, *, exact: int = _ROPE) -> tuple[Tensor, Tensor | None]:
    """Return a layer's codes (B, 1, 1, size, D) and scales, with `exact` numbers in bf16 after the latents."""
    is_wide, shape = pool_dtype == torch.bfloat16, (4096, 1, 1, size)
    codes = torch.empty(*shape, _LATENT + (exact if is_wide else 2 * exact), dtype=pool_dtype, device=DEVICE)
    return codes, None if is_wide else numbers(*shape)


def choose_positions(pool_dtype: torch.dtype, num_heads: int) -> None:
    """Score the keys of decoding rows and of a prompt, choose positions, and attend to them."""
    layer, q = latent_layer(pool_dtype, _S, exact=_ROPE + _INDEX), numbers(_ROWS, num_heads, _INDEX)
    for tile in (1, TILE_QUERIES):
        num_tiles = _ROWS // tile
        contexts, tables = ints(num_tiles), ints(num_tiles, _CONTEXT // _S)
        launch_index_scores(
            q,
            numbers(_ROWS, num_heads).float(),
            *layer,
            tile=tile,
            tables_RB=tables,
            contexts_R=contexts,
            splits=Splits.of(contexts, num_heads=1, longest=_CONTEXT, resident=RESIDENT),
            scores_QL=numbers(_ROWS, _CONTEXT).float(),
        )
    scores = numbers(_ROWS, _CONTEXT).float()
    launch_best_slots(scores, ints(_ROWS), ints(_ROWS, _CONTEXT // _S), tile=1, block_size=_S, top_k=_TOP_K)
    launch_latent_decode_attention(
        numbers(_ROWS, _LATENT_HEADS, _LATENT + _ROPE),
        *latent_layer(pool_dtype, 1, exact=_ROPE + _INDEX),
        numbers(_LATENT_HEADS, _VALUE, _LATENT),
        scale=0.1,
        tables_RB=ints(_ROWS, _TOP_K),
        contexts_R=ints(_ROWS),
        splits=splits_of_latents(ints(_ROWS), num_heads=_LATENT_HEADS, longest=_TOP_K),
    )


def attend_latents(pool_dtype: torch.dtype, num_heads: int) -> None:
    contexts = ints(_ROWS)
    launch_latent_decode_attention(
        numbers(_ROWS, num_heads, _LATENT + _ROPE),
        *latent_layer(pool_dtype, _S),
        numbers(num_heads, _VALUE, _LATENT),
        scale=0.1,
        tables_RB=ints(_ROWS, _CONTEXT // _S),
        contexts_R=contexts,
        splits=splits_of_latents(contexts, num_heads=num_heads, longest=_CONTEXT),
    )


def dense(
    q: Tensor, k: Tensor, shared: Tensor | None, v: Tensor, tiles: QueryTiles, part: Slice, rule: AttentionRule
) -> None:
    launch_dense_prefill_attention(
        q,
        k,
        shared,
        v,
        tiles=tiles,
        firsts_R=ints(_ROWS),
        contexts_R=ints(_ROWS),
        rule=rule,
        out_THW=torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=DEVICE),
        part=part,
    )


if __name__ == "__main__":
    main()
