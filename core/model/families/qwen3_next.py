"""Qwen3-Next and Qwen3.5: Gated DeltaNet in most layers, gated attention in the others."""

from __future__ import annotations

from core.model.families.family import (
    FULL,
    LINEAR,
    Family,
    Fields,
    common,
    layer_kinds,
    stacked_experts,
    with_recurrent_layers,
    with_rope,
)
from core.model.families.mixtral import with_qwen_experts
from core.model.recurrent import DeltaNetShape
from core.model.settings import Settings


def _qwen3_next(settings: Settings) -> Fields:
    return with_qwen_experts(settings, _hybrid(settings, is_fused=True))


def _qwen3_5(settings: Settings) -> Fields:
    return _hybrid(settings, is_fused=False)


def _qwen3_5_moe(settings: Settings) -> Fields:
    # Every layer has experts, whose weights are normalized whatever the file says.
    settings = settings.replaced(norm_topk_prob=True, intermediate_size=settings.count("moe_intermediate_size"))
    return with_qwen_experts(settings, _hybrid(settings, is_fused=False))


def _hybrid(settings: Settings, *, is_fused: bool) -> Fields:
    """Read the fields that the three families share. is_fused: see DeltaNetShape."""
    fields = with_rope(settings, common(settings), can_be_partial=True)
    key = "mtp_num_hidden_layers" if "mtp_num_hidden_layers" in settings else "num_nextn_predict_layers"
    fields |= {"num_further_layers": settings.count(key, 0, least=0)}
    fields |= {"qk_norm": "head", "norms_add_one": True, "norms_round_late": True, "has_attention_gate": True}
    shape = DeltaNetShape(
        hidden_size=fields["hidden_size"],
        num_key_heads=settings.count("linear_num_key_heads"),
        num_value_heads=settings.count("linear_num_value_heads"),
        key_dim=settings.count("linear_key_head_dim"),
        value_dim=settings.count("linear_value_head_dim"),
        conv_width=settings.count("linear_conv_kernel_dim", least=2),
        norm_eps=fields["rms_norm_eps"],
        is_fused=is_fused,
    )
    interval = settings.count("full_attention_interval", 4)
    kinds = layer_kinds(
        settings, fields["num_layers"], lambda index: LINEAR if (index + 1) % interval else FULL, (FULL, LINEAR)
    )
    return with_recurrent_layers(fields, [kind == LINEAR for kind in kinds], shape)


_DEFAULTS = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MOE_DEFAULTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

FAMILIES = (
    Family(
        architectures=("Qwen3NextForCausalLM",),
        model_types=("qwen3_next",),
        read=_qwen3_next,
        defaults=_DEFAULTS
        | _MOE_DEFAULTS
        | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "num_key_value_heads": 2},
        stored=stacked_experts(),
    ),
    Family(
        architectures=("Qwen3_5ForCausalLM",),
        model_types=("qwen3_5_text",),
        read=_qwen3_5,
        defaults=_DEFAULTS | {"num_key_value_heads": 4},
    ),
    Family(
        architectures=("Qwen3_5MoeForCausalLM",),
        model_types=("qwen3_5_moe_text",),
        read=_qwen3_5_moe,
        defaults=_DEFAULTS | _MOE_DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8, "num_key_value_heads": 2},
        stored=stacked_experts(),
    ),
)
