"""Granite 3: Llama with scales of embeddings, attention scores, residual additions and logits."""

from __future__ import annotations

from core.model.families.family import Family, Fields, common, with_rope
from core.model.settings import Settings


def granite(settings: Settings) -> Fields:
    return with_rope(settings, common(settings)) | {
        "embedding_scale": settings.real("embedding_multiplier", 1.0),
        "score_scale": settings.real("attention_multiplier", 1.0),
        "residual_scale": settings.real("residual_multiplier", 1.0),
        "logits_scale": 1 / settings.real("logits_scaling", 1.0),
    }


FAMILIES = (Family("GraniteForCausalLM", ("granite",), granite, {"max_position_embeddings": 2048}),)
