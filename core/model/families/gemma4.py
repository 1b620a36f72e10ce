"""Gemma 4: unlike heads, layers that share keys and values, embeddings per layer, and experts beside an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.model.families.family import (
    FULL,
    SLIDING,
    Family,
    Fields,
    Stored,
    count_experts,
    layer_kinds,
    stacked_experts,
    with_overrides,
    with_ropes,
    with_windows,
)
from core.model.families.gemma import gemma_fields
from core.model.rope import read_rope
from core.model.settings import Settings
from core.model.shape import ExpertsConfig
from core.types.errors import SpecError

_ROPES: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _gemma4(settings: Settings) -> Fields:
    fields = gemma_fields(settings, adds_one=False)
    num_layers = fields["num_layers"]
    kinds = layer_kinds(settings, num_layers, lambda index: SLIDING if (index + 1) % 6 else FULL)
    kinds[-1] = FULL
    fields = _with_layers(settings, fields, kinds)
    for kind in _ROPES:
        dims = {layer.head_dim for layer, own in zip(fields["layers"], kinds, strict=True) if own == kind}
        if len(dims) > 1:
            raise SpecError(f"per_layer_config: head_dim {sorted(dims)} of {kind} layers, which must have the same one")
    given = Settings(settings.object("rope_parameters"))
    ropes = {
        kind: read_rope(
            settings,
            head_dim=fields["layers"][kinds.index(kind)].head_dim,
            can_be_partial=True,
            parameters=given.object(kind) or default,
        )
        for kind, default in _ROPES.items()
        if kind in kinds
    }
    fields = with_windows(settings, with_ropes(fields, ropes, kinds), kinds)
    fields |= {
        "max_context": fields["max_position"],
        "qk_norm": "head",
        "has_value_norm": True,
        "score_scale": 1.0,
        "has_layer_scales": True,
        "per_layer_dim": settings.count("hidden_size_per_layer_input", 256, least=0),
        "per_layer_vocab_size": settings.count("vocab_size_per_layer_input", 262144, least=0),
    }
    settings.get("num_experts")  # files of dense models may have it
    if settings.switch("enable_moe_block"):
        fields["experts"] = ExpertsConfig(
            **count_experts(settings, "num_experts", "top_k_experts"),
            intermediate_size=settings.count("moe_intermediate_size"),
            normalizes_weights=True,
            has_expert_scales=True,
            beside_mlp=True,
        )
        fields["layers"] = tuple(replace(layer, is_sparse=True) for layer in fields["layers"])
    return fields


def _with_layers(settings: Settings, fields: Fields, kinds: list[str]) -> Fields:
    """Set the heads of layers with full attention, and the earlier layer whose keys and values the last ones share."""
    num_layers, layers = fields["num_layers"], list(with_overrides(settings, fields["layers"]))
    is_shared = settings.switch("attention_k_eq_v")
    has_global = is_shared and "num_global_key_value_heads" in settings
    num_global = settings.count("num_global_key_value_heads") if has_global else None
    first_shared = num_layers - settings.count("num_kv_shared_layers", 0, least=0)
    is_wide = settings.switch("use_double_wide_mlp")
    for index, kind in enumerate(kinds):
        if kind == FULL:
            layers[index] = replace(layers[index], values_are_keys=is_shared)
            if "per_layer_config" not in settings:
                heads = num_global or layers[index].num_kv_heads
                layers[index] = replace(
                    layers[index], head_dim=settings.count("global_head_dim", 512), num_kv_heads=heads
                )
        if index >= first_shared:
            sources = [earlier for earlier in range(first_shared) if kinds[earlier] == kind]
            if not sources:
                raise SpecError(f"num_kv_shared_layers: layer {index} has no earlier layer of {kind} to share with")
            size = layers[index].intermediate_size * (2 if is_wide else 1)
            layers[index] = replace(layers[index], kv_layer=sources[-1], intermediate_size=size)
    return fields | {"layers": tuple(layers)}


FAMILIES = (
    Family(
        architectures=("Gemma4ForCausalLM",),
        model_types=("gemma4_text", "gemma4_unified_text"),
        read=_gemma4,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "max_position_embeddings": 131072,
            "vocab_size": 262144,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
        },
        stored=(
            Stored(pattern=r"router\.proj", name="mlp.gate"),
            Stored(pattern=r"router\.(scale|per_expert_scale)", name="mlp.gate.{0}"),
            *stacked_experts("experts"),
            # Quantized files keep the experts apart.
            Stored(pattern=r"(?<!mlp\.)experts\.(\d+\.(?:gate|up|down)_proj)", name="mlp.experts.{0}"),
        ),
    ),
)
