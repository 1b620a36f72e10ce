"""Latent attention: rows of one query read in place get what gathered ones get, alone or beside prompts."""

from __future__ import annotations

import pytest
import torch

from engine.batch import Batch, Row
from engine.kv_layout import KVLayout
from engine.kv_pool import KVPool
from engine.latent_heads import Expansion, LatentHeads

CPU = torch.device("cpu")
LATENT, ROPE, NOPE, VALUE, HEADS = 24, 8, 12, 10, 3


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def naive(q_THD: torch.Tensor, pool: KVPool, rows: list[Row], expansion: Expansion, scale: float) -> torch.Tensor:
    """One query and one head after the other, over expanded keys and values."""
    out, token = torch.empty(len(q_THD), HEADS, VALUE), 0
    for row in rows:
        kept_LD = pool.read(0, torch.tensor(list(row.blocks)), torch.float32)[0, 0]
        for position in range(row.start, row.end):
            seen = kept_LD[: position + 1]
            for head in range(HEADS):
                keys = torch.cat((seen[:, :LATENT] @ expansion.key_HNC[head].T, seen[:, LATENT:]), dim=-1)
                weights = (keys @ q_THD[token, head] * scale).softmax(dim=0)
                out[token, head] = weights @ (seen[:, :LATENT] @ expansion.value_HWC[head].T)
            token += 1
    return out


@pytest.mark.parametrize("dtype", ["float32", "fp8_e4m3"])
@pytest.mark.parametrize("uses_kernel", [False, True])
def test_any_mix_of_rows(uses_kernel: bool, dtype: str) -> None:
    layout = KVLayout(
        model="m",
        num_layers=1,
        num_kv_heads=1,
        head_dim=LATENT + ROPE,
        block_size=4,
        dtype=dtype,
        num_sides=1,
        exact_dim=ROPE,
    )
    pool = KVPool(layout, num_blocks=40, device=CPU)
    pool.write_latents(0, torch.arange(160), random(160, LATENT + ROPE))
    order = iter(torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist())
    rows = [
        Row(
            token_ids=range(n),
            start=start,
            blocks=[next(order) for _ in range(-(-(start + n) // 4))],
            wants_logits=True,
        )
        for start, n in [(0, 1), (0, 6), (29, 1), (9, 5), (14, 1)]
    ]
    batch = Batch.of(rows, block_size=4)
    q = random(batch.num_tokens, HEADS, NOPE + ROPE, seed=2)
    expansion = Expansion(random(HEADS, NOPE, LATENT, seed=3) / 5, random(HEADS, VALUE, LATENT, seed=4) / 5)
    angles = torch.zeros(batch.num_tokens, 1, ROPE // 2)
    heads = LatentHeads(
        batch, pool, angles.cos(), angles.sin(), scale=0.3, is_interleaved=False, uses_kernel=uses_kernel
    )
    got = heads.attend(0, q, expansion)
    torch.testing.assert_close(got, naive(q, pool, rows, expansion, 0.3), atol=1e-4, rtol=1e-4)
