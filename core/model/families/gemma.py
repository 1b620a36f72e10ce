"""Gemma 2 and 3: norms before and after each part, soft caps, alternating windows."""

from __future__ import annotations

import math

from core.model.families.family import (
    FULL,
    SLIDING,
    Family,
    Fields,
    activation,
    common,
    layer_kinds,
    with_rope,
    with_ropes,
    with_windows,
)
from core.model.rope import read_rope
from core.model.settings import Settings
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


def gemma_fields(settings: Settings, *, adds_one: bool) -> Fields:
    """Read what all Gemma models have in common."""
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
    fields = with_rope(settings, gemma_fields(settings, adds_one=True)) | _score_scale(settings)
    fields["score_soft_cap"] = settings.optional_real("attn_logit_softcapping")
    kinds = layer_kinds(settings, fields["num_layers"], lambda index: FULL if index % 2 else SLIDING)
    return with_windows(settings, fields, kinds)


def _gemma3(settings: Settings) -> Fields:
    fields = gemma_fields(settings, adds_one=True) | _score_scale(settings) | {"qk_norm": "head"}
    settings.get("attn_logit_softcapping")  # Gemma 2's, which transformers ignores
    pattern = settings.count("sliding_window_pattern", 6)
    kinds = layer_kinds(
        settings,
        fields["num_layers"],
        lambda index: SLIDING if (index + 1) % pattern else FULL,
    )
    nested = Settings(settings.object("rope_parameters"))
    local = {"rope_theta": settings.real("rope_local_base_freq", 10000.0), **nested.object(SLIDING)}
    whole = {"rope_theta": settings.real("rope_theta", 1e6), **nested.object(FULL)}
    whole |= settings.object("rope_scaling")
    ropes = {
        SLIDING: read_rope(settings, head_dim=fields["head_dim"], parameters=local),
        FULL: read_rope(settings, head_dim=fields["head_dim"], parameters=whole),
    }
    fields = with_windows(settings, with_ropes(fields, ropes, kinds), kinds)
    # The scaling of full layers is part of max_position_embeddings.
    return fields | {"max_context": fields["max_position"]}


def _score_scale(settings: Settings) -> Fields:
    return {"score_scale": settings.real("query_pre_attn_scalar", 256) ** -0.5}


FAMILIES = (
    Family(
        architectures=("Gemma2ForCausalLM",),
        model_types=("gemma2",),
        read=_gemma2,
        defaults=_DEFAULTS
        | {"vocab_size": 256000, "max_position_embeddings": 8192}
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    ),
    Family(
        architectures=("Gemma3ForCausalLM",),
        model_types=("gemma3_text",),
        read=_gemma3,
        defaults=_DEFAULTS | {"vocab_size": 262208, "max_position_embeddings": 131072},
    ),
)
