"""Granite MoE, and Granite 4: Mamba-2 instead of attention in most layers, a dense MLP or experts with a shared one."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from core.model.families.family import (
    FULL,
    LINEAR,
    Family,
    Fields,
    Stored,
    layer_kinds,
    stacked_experts,
    with_experts_everywhere,
    with_recurrent_layers,
)
from core.model.families.granite import granite
from core.model.recurrent import MambaShape
from core.model.settings import Settings

_SHARED_IN, _SHARED_OUT, _GATE_UP = r"shared_mlp\.input_linear", r"shared_mlp\.output_linear", ("gate_proj", "up_proj")
_EXPERTS = (
    Stored(pattern=r"block_sparse_moe\.router\.layer", name="mlp.gate"),
    *stacked_experts("block_sparse_moe", names=("input_linear", "output_linear")),
)


def _granite_moe(settings: Settings) -> Fields:
    return with_experts_everywhere(settings, granite(settings))


def _granite_hybrid(settings: Settings) -> Fields:
    shared = settings.count("shared_intermediate_size")
    has_experts = settings.count("num_local_experts", least=0) > 0
    # Without experts, the shared one is the MLP.
    fields = granite(settings if has_experts else settings.replaced(intermediate_size=shared))
    key = "layer_types" if "layer_types" in settings else "layers_block_type"
    kinds = layer_kinds(settings, fields["num_layers"], lambda index: LINEAR, (FULL, LINEAR), key=key)
    is_rotated = settings.get("position_embedding_type") == "rope"
    attention = replace(fields["layers"][0], rope=0 if is_rotated else None)
    fields["layers"] = (attention,) * fields["num_layers"]
    fields = with_recurrent_layers(fields, [kind == LINEAR for kind in kinds], _mamba(settings, fields))
    if not has_experts:
        return fields
    return with_experts_everywhere(settings, fields, shared_size=shared)


def _mamba(settings: Settings, fields: Fields) -> MambaShape:
    num_heads, width = settings.count("mamba_n_heads"), settings.count("mamba_expand") * fields["hidden_size"]
    dim = width // num_heads if settings.get("mamba_d_head") == "auto" else settings.count("mamba_d_head")
    min_dt, max_dt = settings.limits("time_step_limit", (0.0, inf))
    return MambaShape(
        hidden_size=fields["hidden_size"],
        num_heads=num_heads,
        head_dim=dim,
        num_groups=settings.count("mamba_n_groups"),
        state_dim=settings.count("mamba_d_state"),
        conv_width=settings.count("mamba_d_conv", least=2),
        norm_eps=fields["rms_norm_eps"],
        min_dt=min_dt,
        max_dt=max_dt,
        has_conv_bias=settings.switch("mamba_conv_bias", True),
        has_bias=settings.switch("mamba_proj_bias"),
    )


FAMILIES = (
    Family(
        architectures=("GraniteMoeForCausalLM",),
        model_types=("granitemoe",),
        read=_granite_moe,
        defaults={"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
        stored=_EXPERTS,
    ),
    Family(
        architectures=("GraniteMoeHybridForCausalLM",),
        model_types=("granitemoehybrid",),
        read=_granite_hybrid,
        defaults={"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
        | {"mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2},
        stored=(
            *_EXPERTS,
            Stored(pattern=_SHARED_IN, name="mlp.{}", parts=_GATE_UP, of="dense"),
            Stored(pattern=_SHARED_IN, name="mlp.shared_experts.{}", parts=_GATE_UP, of="sparse"),
            Stored(pattern=_SHARED_OUT, name="mlp.down_proj", of="dense"),
            Stored(pattern=_SHARED_OUT, name="mlp.shared_experts.down_proj", of="sparse"),
        ),
    ),
)
