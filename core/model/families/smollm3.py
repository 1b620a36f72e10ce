"""SmolLM3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from core.model.families.family import (
    FULL,
    SLIDING,
    Family,
    Fields,
    common,
    layer_kinds,
    with_optional_windows,
    with_rope,
)
from core.model.settings import Settings


def _smollm3(settings: Settings) -> Fields:
    fields = with_rope(settings, common(settings))
    num_layers, interval = fields["num_layers"], settings.count("no_rope_layer_interval", 4)
    has_rope = settings.per_layer("no_rope_layers", num_layers, (1, 0))
    has_rope = has_rope or [(index + 1) % interval != 0 for index in range(num_layers)]
    kinds = layer_kinds(settings, num_layers, lambda index: FULL if has_rope[index] else SLIDING)
    layers = with_optional_windows(settings, fields, kinds)["layers"]
    return fields | {
        "layers": tuple(replace(layer, rope=0 if has else None) for layer, has in zip(layers, has_rope, strict=True))
    }


FAMILIES = (
    Family(
        architectures=("SmolLM3ForCausalLM",),
        model_types=("smollm3",),
        read=_smollm3,
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
    ),
)
