"""Short kernels of a decode step, limited by memory latency rather than bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.kernels.attention.absorb_queries import launch_absorb_queries
from engine.kernels.moe.expert_router import launch_route, new_counters
from engine.kernels.moe.top_k import ChoiceRule

# Name, function to run, its bytes or operations, "bytes" or "flops".
Case = tuple[str, Callable[[], object], float, str]

_TOKENS = 1, 64
_BLOCK_SIZE = 16


def few_tokens(device: torch.device) -> list[Case]:
    """Return cases for benchmarks.engine.kernels.

    Routing with sorting of Qwen3 30B-A3B, and query absorption with row storage of DeepSeek-V2-Lite and V3.
    """
    cases: list[Case] = []
    rule = ChoiceRule(num_choices=8, normalizes_weights=True)
    weight = torch.randn(128, 2048, device=device, dtype=torch.bfloat16)
    nope, rope, latent = 128, 64, 512
    pool = torch.zeros(_TOKENS[-1], 1, 1, _BLOCK_SIZE, latent + rope, device=device, dtype=torch.bfloat16)
    norm = torch.ones(latent, device=device, dtype=torch.bfloat16)
    for num_tokens in _TOKENS:
        x = torch.randn(num_tokens, 2048, device=device, dtype=torch.bfloat16)
        choose = partial(launch_route, x, weight, None, new_counters(device), rule, is_exact=False)
        cases.append((f"route {num_tokens}", choose, weight.nbytes, "bytes"))
        row = torch.randn(num_tokens, latent + rope, device=device, dtype=torch.bfloat16)
        cos, sin = torch.randn(2, num_tokens, 1, rope // 2, device=device, dtype=torch.bfloat16)
        slots = torch.arange(num_tokens, dtype=torch.int32, device=device)
        for num_heads in (16, 128):
            q = torch.randn(num_tokens, num_heads, nope + rope, device=device, dtype=torch.bfloat16)
            key = torch.randn(num_heads, nope, latent, device=device, dtype=torch.bfloat16)
            stored = (q, row, norm, 1e-6, cos, sin, pool, None, slots, key)
            absorb = partial(launch_absorb_queries, *stored, is_interleaved=True)
            num_bytes = key.nbytes + q.nbytes + q.nbytes * (latent + rope) // (nope + rope)
            cases.append((f"absorb_queries {num_heads} heads {num_tokens}", absorb, num_bytes, "bytes"))
    return cases
