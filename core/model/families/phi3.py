"""Phi-3 and Phi-4-mini: fused projections, and contexts that are lengthened by LongRoPE."""

from __future__ import annotations

from core.model.families.family import Family, Fields, Stored, common, with_rope, with_windows
from core.model.settings import Settings


def _phi3(settings: Settings) -> Fields:
    fields = with_rope(settings, common(settings), can_be_partial=True)
    return with_windows(settings, fields, ["sliding_attention"] * fields["num_layers"])


FAMILIES = (
    Family(
        architectures=("Phi3ForCausalLM",),
        model_types=("phi3",),
        read=_phi3,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        stored=(
            Stored(
                pattern=r"self_attn\.qkv_proj",
                name="self_attn.{}",
                parts=("q_proj", "k_proj", "v_proj"),
                split="qkv",
            ),
            Stored(pattern=r"mlp\.gate_up_proj", name="mlp.{}", parts=("gate_proj", "up_proj")),
        ),
    ),
)
