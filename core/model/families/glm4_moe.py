"""GLM-4.5, 4.6 and 4.7: experts with sigmoid scores beside grouped-query attention."""

from __future__ import annotations

from core.model.families.deepseek import with_experts
from core.model.families.family import Family, Fields, common, with_rope
from core.model.settings import Settings


def _glm4_moe(settings: Settings) -> Fields:
    fields = with_rope(settings, common(settings), can_be_partial=True) | {"has_output_bias": False}
    if settings.switch("use_qk_norm"):
        fields["qk_norm"] = "head"
    return with_experts(settings, fields, scores="sigmoid", normalizes=settings.switch("norm_topk_prob", True))


FAMILIES = (
    Family(
        architectures=("Glm4MoeForCausalLM",),
        model_types=("glm4_moe", "glm4v_moe_text"),
        read=_glm4_moe,
        defaults={"partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}
        | {"num_key_value_heads": 8, "max_position_embeddings": 131072}
        | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
    ),
)
