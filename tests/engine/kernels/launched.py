"""Patches that choose what computes a model's step on a CPU: kernels in Triton's interpreter, or their references."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from engine.attention import chosen_slots, triton_heads, triton_latent_heads
from engine.kernels import gated_mul
from engine.kernels.attention.kv_splits import Splits, share_out
from engine.kernels.gated_mul import launch_gated_mul
from engine.kernels.moe.expert_router import MOST_TOKENS
from engine.kernels.moe.top_k import launch_choose_experts
from engine.kernels.recurrent.causal_conv import launch_causal_conv
from engine.kernels.recurrent.gated_norm import launch_gated_rms_norm
from engine.kernels.recurrent.linear_recurrence import launch_linear_recurrence
from engine.kernels.rms_norm import launch_add_rms_norm, launch_rms_norm
from engine.layers import layers
from engine.model import expert_bank, recurrent_ops, routing
from tests.support import attention_references, product_references

# Operations that the product computes on GPUs only.
_REFERRED: list[tuple[ModuleType, ModuleType, tuple[str, ...]]] = [
    (
        triton_heads,
        attention_references,
        ("decode_attention", "prefill_attention", "dense_prefill_attention", "gather_rows", "store_heads"),
    ),
    (
        triton_latent_heads,
        attention_references,
        ("latent_decode_attention", "dense_prefill_attention", "absorb_queries", "store_latents"),
    ),
    (chosen_slots, attention_references, ("latent_decode_attention", "index_scores", "best_slots")),
    (expert_bank, product_references, ("fused_experts", "coded_experts")),
]
_LAUNCHERS = {(module, name): getattr(module, f"launch_{name}") for module, _, names in _REFERRED for name in names}
_SPLIT = Splits.of


def refer_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make KernelHeads, KernelLatentHeads and banks of experts compute tensors on a CPU with references."""
    for module, references, names in _REFERRED:
        for name in names:
            chosen = _chosen(_LAUNCHERS[module, name], getattr(references, f"reference_{name}"))
            monkeypatch.setattr(module, f"launch_{name}", chosen)

    def of(contexts_R: Tensor, **facts: Any) -> Splits:
        return _SPLIT(contexts_R, **facts) if contexts_R.is_cuda else Splits(contexts_R, contexts_R)

    monkeypatch.setattr(Splits, "of", of)


def _chosen(launch: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda first, *rest, **named: (launch if first.is_cuda else reference)(first, *rest, **named)


def launch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make KernelHeads, KernelLatentHeads and a model's layers launch kernels on any device."""
    for (module, name), launch in _LAUNCHERS.items():
        monkeypatch.setattr(module, f"launch_{name}", launch)
    for module, name, launch in (
        (routing, "reference_choose_experts", launch_choose_experts),
        (routing, "can_fuse", lambda x_TE: len(x_TE) <= MOST_TOKENS),
        (layers, "rms_norm", launch_rms_norm),
        (layers, "add_rms_norm", launch_add_rms_norm),
        (gated_mul, "gated_mul", launch_gated_mul),
        (recurrent_ops, "reference_causal_conv", launch_causal_conv),
        (recurrent_ops, "reference_linear_recurrence", launch_linear_recurrence),
        (recurrent_ops, "reference_gated_rms_norm", launch_gated_rms_norm),
    ):
        monkeypatch.setattr(module, name, launch)

    def of(contexts_R: Tensor, *, num_heads: int, longest: int, resident: int, **seen: Any) -> Splits:
        return share_out(contexts_R, **seen, num_programs=3)

    monkeypatch.setattr(Splits, "of", of)
