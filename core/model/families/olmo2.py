"""OLMo-2: Llama with norms after attention and MLP instead of before, and norms on queries and keys of all heads."""

from __future__ import annotations

from core.model.families.family import Family, Fields, common, with_rope
from core.model.settings import Settings


def _olmo2(settings: Settings) -> Fields:
    return with_rope(settings, common(settings)) | {
        "qk_norm": "projection",
        "has_pre_norms": False,
        "has_post_norms": True,
        "norms_round_late": True,
    }


FAMILIES = (
    Family(
        architectures=("Olmo2ForCausalLM",),
        model_types=("olmo2",),
        read=_olmo2,
        defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    ),
)
