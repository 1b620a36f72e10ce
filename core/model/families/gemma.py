"""Gemma 2 and 3: norms before and after each part, soft caps, alternating windows.

Gemma 4: heads that differ by layer, layers that share keys and values, embeddings per layer, and experts beside an MLP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.model.families.family import (
    FULL,
    SLIDING,
    Family,
    Fields,
    Stored,
    activation,
    common,
    count_experts,
    layer_kinds,
    stacked_experts,
    with_layers,
    with_overrides,
    with_rope,
    with_ropes,
    with_windows,
)
from core.model.rope_settings import read_rope
from core.model.settings import Settings
from core.model.shape import ExpertsConfig
from core.types.errors import SpecError

_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA4_ROPES: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _gemma(settings: Settings, *, adds_one: bool) -> Fields:
    """Read the settings that all Gemma models share."""
    if settings.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise SpecError("use_bidirectional_attention is not supported: this model encodes text, it does not generate")
    fields = common(settings)
    return fields | {
        "activation": activation(settings, "hidden_activation", "gelu_pytorch_tanh"),
        "has_post_norms": True,
        "norms_add_one": settings.switch("norms_add_one", adds_one),
        "norms_round_late": True,
        "embedding_scale": math.sqrt(fields["hidden_size"]),
        "logits_soft_cap": settings.optional_real("final_logit_softcapping"),
    }


def _gemma2(settings: Settings) -> Fields:
    fields = with_rope(settings, _gemma(settings, adds_one=True)) | _score_scale(settings)
    fields["score_soft_cap"] = settings.optional_real("attn_logit_softcapping")
    kinds = layer_kinds(settings, fields["num_layers"], lambda index: FULL if index % 2 else SLIDING)
    return with_windows(settings, fields, kinds)


def _gemma3(settings: Settings) -> Fields:
    fields = _gemma(settings, adds_one=True) | _score_scale(settings) | {"qk_norm": "head"}
    settings.get("attn_logit_softcapping")  # Gemma 2's, which transformers ignores
    pattern = settings.count("sliding_window_pattern", 6)
    kinds = layer_kinds(settings, fields["num_layers"], lambda index: SLIDING if (index + 1) % pattern else FULL)
    nested = Settings(settings.object("rope_parameters"))
    local = {"rope_theta": settings.real("rope_local_base_freq", 10000.0), **nested.object(SLIDING)}
    whole = {"rope_theta": settings.real("rope_theta", 1e6), **nested.object(FULL)}
    whole |= settings.object("rope_scaling")
    ropes = {
        SLIDING: read_rope(settings, head_dim=fields["head_dim"], parameters=local),
        FULL: read_rope(settings, head_dim=fields["head_dim"], parameters=whole),
    }
    fields = with_windows(settings, with_ropes(fields, ropes, kinds), kinds)
    # max_position_embeddings already includes the scaling of full layers.
    return fields | {"max_context": fields["max_position"]}


def _score_scale(settings: Settings) -> Fields:
    return {"score_scale": settings.real("query_pre_attn_scalar", 256) ** -0.5}


def _gemma4(settings: Settings) -> Fields:
    fields = _gemma(settings, adds_one=False)
    num_layers = fields["num_layers"]
    kinds = layer_kinds(settings, num_layers, lambda index: SLIDING if (index + 1) % 6 else FULL)
    kinds[-1] = FULL
    fields = _with_layers(settings, fields, kinds)
    for kind in _GEMMA4_ROPES:
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
        for kind, default in _GEMMA4_ROPES.items()
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
        fields = with_layers(fields, is_sparse=[True] * num_layers)
    return fields


def _with_layers(settings: Settings, fields: Fields, kinds: list[str]) -> Fields:
    """Set the heads of full-attention layers, and the earlier layer whose keys and values the last layers share."""
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
        "Gemma2ForCausalLM",
        ("gemma2",),
        _gemma2,
        _DEFAULTS
        | {"vocab_size": 256000, "max_position_embeddings": 8192}
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    Family(
        "Gemma3ForCausalLM",
        ("gemma3_text",),
        _gemma3,
        _DEFAULTS | {"vocab_size": 262208, "max_position_embeddings": 131072},
    ),
    Family(
        "Gemma4ForCausalLM",
        ("gemma4_text", "gemma4_unified_text"),
        _gemma4,
        _DEFAULTS
        | {"num_hidden_layers": 30, "sliding_window": 512, "vocab_size": 262144, "max_position_embeddings": 131072},
        (
            Stored(r"router\.proj", "mlp.gate"),
            Stored(r"router\.(scale|per_expert_scale)", "mlp.gate.{0}"),
            *stacked_experts("experts"),
            # Quantized files keep the experts apart.
            Stored(r"(?<!mlp\.)experts\.(\d+\.(?:gate|up|down)_proj)", "mlp.experts.{0}"),
        ),
    ),
)
