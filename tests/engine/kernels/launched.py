"""Patches that replace references by kernels, so that a model's step runs in Triton's interpreter as on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from engine.attention import chosen_slots
from engine.attention import triton_heads as heads
from engine.attention import triton_latent_heads as latent_heads
from engine.kernels import gated_mul
from engine.kernels.attention.absorb_queries import launch_absorb_queries
from engine.kernels.attention.best_positions import launch_best_slots
from engine.kernels.attention.decode_attention import launch_decode_attention
from engine.kernels.attention.dense_prefill import launch_dense_prefill_attention
from engine.kernels.attention.gather_rows import launch_gather_rows
from engine.kernels.attention.index_scores import launch_index_scores
from engine.kernels.attention.kv_splits import Splits, share_out
from engine.kernels.attention.latent_attention import launch_latent_decode_attention
from engine.kernels.attention.prefill_attention import launch_prefill_attention
from engine.kernels.attention.store_heads import launch_store_heads
from engine.kernels.attention.store_latents import launch_store_latents
from engine.kernels.gated_mul import launch_gated_mul
from engine.kernels.moe import fused_experts
from engine.kernels.moe.expert_router import launch_route
from engine.kernels.moe.expert_tiles import launch_sort_into_tiles
from engine.kernels.moe.fused_experts import launch_fused_experts
from engine.kernels.moe.top_k import launch_choose_experts
from engine.kernels.recurrent.causal_conv import launch_causal_conv
from engine.kernels.recurrent.gated_norm import launch_gated_rms_norm
from engine.kernels.recurrent.linear_recurrence import launch_linear_recurrence
from engine.kernels.rms_norm import launch_add_rms_norm, launch_rms_norm
from engine.layers import layers
from engine.model import expert_bank, experts, recurrent_mixers


def launch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make KernelHeads, KernelLatentHeads and a model's layers launch kernels on any device."""
    for module, name, launch in (
        (heads, "decode_attention", launch_decode_attention),
        (heads, "prefill_attention", launch_prefill_attention),
        (heads, "store_heads", launch_store_heads),
        (latent_heads, "latent_decode_attention", launch_latent_decode_attention),
        (latent_heads, "absorb_queries", launch_absorb_queries),
        (latent_heads, "store_latents", launch_store_latents),
        (chosen_slots, "latent_decode_attention", launch_latent_decode_attention),
        (chosen_slots, "index_scores", launch_index_scores),
        (chosen_slots, "best_slots", launch_best_slots),
        (expert_bank, "fused_experts", launch_fused_experts),
        (fused_experts, "sort_into_tiles", launch_sort_into_tiles),
        (experts, "choose_experts", launch_choose_experts),
        (experts, "route", launch_route),
        (latent_heads, "dense_prefill_attention", launch_dense_prefill_attention),
        (heads, "dense_prefill_attention", launch_dense_prefill_attention),
        (heads, "gather_rows", launch_gather_rows),
        (layers, "rms_norm", launch_rms_norm),
        (layers, "add_rms_norm", launch_add_rms_norm),
        (gated_mul, "gated_mul", launch_gated_mul),
        (recurrent_mixers, "causal_conv", launch_causal_conv),
        (recurrent_mixers, "linear_recurrence", launch_linear_recurrence),
        (recurrent_mixers, "gated_rms_norm", launch_gated_rms_norm),
    ):
        monkeypatch.setattr(module, name, launch)

    def of(contexts_R: Tensor, *, num_heads: int, longest: int, resident: int, **seen: Any) -> Splits:
        return share_out(contexts_R, **seen, num_programs=3)

    monkeypatch.setattr(Splits, "of", of)
