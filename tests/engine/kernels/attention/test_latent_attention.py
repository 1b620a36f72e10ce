"""Latent attention kernels compared with their references and with softmax over the rows."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from engine.kernels.attention.absorb_queries import launch_absorb_queries
from engine.kernels.attention.attention_rule import AttentionRule
from engine.kernels.attention.dense_prefill import launch_dense_prefill_attention
from engine.kernels.attention.kv_splits import share_out
from engine.kernels.attention.latent_attention import launch_latent_decode_attention
from engine.kernels.attention.queries import QueryTiles
from engine.kernels.attention.store_latents import launch_store_latents
from engine.kernels.quant.row_quantization import dequantize_rows, quantize_rows
from tests.engine.kernels.pools import DEVICE, DTYPES, EIGHT_BITS, random
from tests.support.attention_references import (
    reference_absorb_queries,
    reference_dense_prefill_attention,
    reference_latent_decode_attention,
)
from tests.support.grids import quick

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BLOCKS, BLOCK_SIZE = 24, 8


@pytest.mark.parametrize(
    ("latent_dim", "rope_dim", "num_heads", "num_programs", "kind", "dtype"),
    quick(
        [
            (*shape, kind, dtype)
            for shape, kind, dtype in product(
                [(24, 8, 3, 1), (64, 16, 20, 1), (48, 16, 4, 3), (24, 8, 2, 20)], ["wide", *EIGHT_BITS], DTYPES
            )
        ],
        [
            *((24, 8, 3, 1, "fp8", torch.float16), (64, 16, 20, 1, "fp8", torch.float32)),
            *((48, 16, 4, 3, "int8", torch.float32), (48, 16, 4, 3, "wide", torch.float16)),
            *((24, 8, 2, 20, "int8", torch.float16), (24, 8, 2, 20, "wide", torch.float32)),
        ],
    ),
    ids=str,
)
def test_decode_rows_of_any_length(
    latent_dim: int, rope_dim: int, num_heads: int, num_programs: int, kind: str, dtype: torch.dtype
) -> None:
    pool, scales = random(BLOCKS, 1, 1, BLOCK_SIZE, latent_dim + rope_dim, dtype=dtype, seed=1), None
    if kind in EIGHT_BITS:
        pool, scales = quantize_rows(pool, EIGHT_BITS[kind], exact=rope_dim)
    # A row without keys is padding.
    contexts = [1, 7, 40, 72, 0]
    q = random(len(contexts), num_heads, latent_dim + rope_dim, dtype=dtype)
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2))
    tables = torch.stack([order.roll(i)[:9] for i in range(len(contexts))]).int().to(DEVICE)
    contexts_R = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    value = random(num_heads, 40, latent_dim, dtype=dtype, seed=3) / latent_dim**0.5
    case = {
        "value_HWC": value,
        "scale": 0.2,
        "tables_RB": tables,
        "contexts_R": contexts_R,
        "splits": share_out(contexts_R, num_programs=num_programs),
    }
    expected = reference_latent_decode_attention(q, pool, scales, **case)
    got = launch_latent_decode_attention(q, pool, scales, **case)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not got[-1].any()
    # The first row has a single key, so the result is its expanded latent.
    first = pool[tables[0, 0].long(), 0, 0, 0]
    if kind == "wide":
        expected = value[0] @ first[:latent_dim]
        torch.testing.assert_close(got[0, 0], expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


# NumPy warns about keys that are masked after the product.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("nope", "rope", "value"), quick([(12, 8, 10), (32, 16, 16), (64, 32, 64)], [(12, 8, 10)]))
def test_prompts_equal_reference(nope: int, rope: int, value: int, dtype: torch.dtype) -> None:
    # A whole prompt of two tiles, and chunks after a prefix.
    contexts, lengths = [135, 70, 3], [135, 40, 2]
    # Tokens 0, 176 and 177 belong to other rows.
    begins, firsts = np.array([1, 136, 178]), [0, 144, 216]
    q = random(180, 3, nope + rope, dtype=dtype)
    k, keys, v = (random(220, *shape, dtype=dtype, seed=i) for i, shape in enumerate([(3, nope), (rope,), (3, value)]))
    for numbers in (k, keys, v):
        # Garbage after a row's last key.
        numbers[[135, 143, 214, 219]] = torch.inf
    outs = [torch.full((180, 3, value), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    for attend, out in zip((launch_dense_prefill_attention, reference_dense_prefill_attention), outs, strict=True):
        attend(
            q,
            k,
            keys,
            v,
            tiles=QueryTiles.of(begins, np.array(lengths), np.array(contexts), DEVICE),
            firsts_R=torch.tensor(firsts, dtype=torch.int32, device=DEVICE),
            contexts_R=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
            rule=AttentionRule(scale=0.2),
            out_THW=out,
        )
    torch.testing.assert_close(*outs, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert (outs[0][[0, 176, 177]] == 7.0).all(), "tokens of other rows were written"


@pytest.mark.parametrize("kind", ["wide", *EIGHT_BITS])
def test_negative_slot_writes_nothing(kind: str) -> None:
    pool, scales = random(2, 1, 1, BLOCK_SIZE, 32, seed=1), None
    if kind in EIGHT_BITS:
        pool, scales = quantize_rows(pool, EIGHT_BITS[kind], exact=8)
    before = pool.view(torch.uint8).clone()
    queries, angles = random(1, 2, 12), torch.zeros(1, 1, 4, device=DEVICE)
    stored = queries, random(1, 32), random(24), 1e-6, angles.cos(), angles.sin(), pool, scales
    slots, out = torch.tensor([-1], device=DEVICE), torch.empty_like(queries)
    launch_store_latents(*stored, slots, is_interleaved=False, out_THN=out)
    assert torch.equal(out, queries)
    key = random(2, 4, 24, seed=2)
    absorbed = launch_absorb_queries(*stored, slots, key, is_interleaved=False)
    torch.testing.assert_close(absorbed[..., :24], torch.einsum("thn,hnc->thc", queries[..., :4], key))
    assert torch.equal(absorbed[..., 24:], queries[..., 4:])
    assert torch.equal(pool.view(torch.uint8), before)


@pytest.mark.parametrize(
    ("num_tokens", "kind", "dtype"),
    quick(
        product([3, 70], ["wide", *EIGHT_BITS], DTYPES),
        [(3, "wide", torch.float32), (3, "int8", torch.float16), (70, "fp8", torch.float32)],
    ),
    ids=str,
)
def test_absorb_queries_equals_reference(num_tokens: int, kind: str, dtype: torch.dtype) -> None:
    """More latent numbers and tokens than one program handles; queries and rows are views of a wider product."""
    num_heads, nope, rope, latent = 3, 12, 16, 136
    fused = random(num_tokens, num_heads * (nope + rope) + latent + rope, dtype=dtype)
    q, row = fused.tensor_split((-latent - rope,), dim=-1)
    q = torch.unflatten(q, -1, (num_heads, -1))
    angles = random(num_tokens, 1, rope // 2, dtype=dtype, seed=1)
    key, norm = random(num_heads, nope, latent, dtype=dtype, seed=2) / 4, random(latent, dtype=dtype, seed=3)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(4))[:num_tokens].to(DEVICE)
    pools = []
    for absorb in (launch_absorb_queries, reference_absorb_queries):
        pool, scales = random(10, 1, 1, BLOCK_SIZE, latent + rope, dtype=dtype, seed=5), None
        if kind in EIGHT_BITS:
            pool, scales = quantize_rows(pool, EIGHT_BITS[kind], exact=rope)
        absorbed = absorb(q, row, norm, 1e-6, angles.cos(), angles.sin(), pool, scales, slots, key, is_interleaved=True)
        kept = pool if scales is None else dequantize_rows(pool, scales, torch.float32, exact=rope)
        pools.append((absorbed, kept.float()))
    # A number between two codes may become either.
    bound = TOLERANCE[dtype] if kind == "wide" else 0.13
    torch.testing.assert_close(pools[0][0], pools[1][0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(pools[0][1], pools[1][1], atol=bound, rtol=bound)
