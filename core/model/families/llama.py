"""Dense models: Llama 2 and 3, SmolLM2, SmolLM3, Mistral, Ministral 3, Qwen2 to Qwen3, OLMo-2, Phi-3 and Phi-4-mini."""

from __future__ import annotations

from core.model.families.family import (
    FULL,
    SLIDING,
    Family,
    Fields,
    Stored,
    common,
    layer_kinds,
    with_default_rope,
    with_layers,
    with_optional_windows,
    with_rope,
    with_windows,
)
from core.model.settings import Settings
from core.model.shape import QueryScaling

_QWEN = {"sliding_window": 4096, "max_position_embeddings": 32768}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _llama(settings: Settings) -> Fields:
    return with_rope(settings, common(settings))


def _mistral(settings: Settings) -> Fields:
    fields = with_rope(settings, common(settings))
    fields |= {"has_qkv_bias": False, "has_output_bias": False}
    return with_windows(settings, fields, [SLIDING] * fields["num_layers"])


def _ministral3(settings: Settings) -> Fields:
    settings = with_default_rope(settings, _MINISTRAL3_ROPE)
    fields = _mistral(settings)
    return with_query_scaling(settings, fields)


def with_query_scaling(settings: Settings, fields: Fields) -> Fields:
    """Add the query scaling of Ministral 3 and Mistral Small 4, whose settings are among the rotary ones."""
    rope = Settings(settings.object("rope_scaling") or settings.object("rope_parameters"))
    if not rope.get("llama_4_scaling_beta"):
        return fields
    interval = int(fields["ropes"][0].original_max_position)
    scaling = QueryScaling(scale=rope.real("llama_4_scaling_beta"), interval=interval)
    return with_layers(fields | {"query_scaling": scaling}, scales_queries=[True] * fields["num_layers"])


def qwen_windows(settings: Settings, fields: Fields) -> Fields:
    """Add Qwen's windows: those of the layers from `max_window_layers` on, if `use_sliding_window` is set."""
    num_layers, first = fields["num_layers"], settings.count("max_window_layers", 28, least=0)
    kinds = layer_kinds(settings, num_layers, lambda index: FULL if index < first else SLIDING)
    return with_optional_windows(settings, fields, kinds)


def _qwen2(settings: Settings) -> Fields:
    fields = with_rope(settings, common(settings))
    fields |= {"has_qkv_bias": fields["has_qkv_bias"] or settings.switch("qkv_bias", True), "has_output_bias": False}
    return qwen_windows(settings, fields)


def _qwen3(settings: Settings) -> Fields:
    fields = with_rope(settings, common(settings, head_dim=128)) | {"qk_norm": "head"}
    return qwen_windows(settings, fields)


def _smollm3(settings: Settings) -> Fields:
    """Read SmolLM3: no rotation in every fourth layer."""
    fields = with_rope(settings, common(settings))
    num_layers, interval = fields["num_layers"], settings.count("no_rope_layer_interval", 4)
    has_rope = settings.per_layer("no_rope_layers", num_layers, (1, 0))
    has_rope = has_rope or [(index + 1) % interval != 0 for index in range(num_layers)]
    kinds = layer_kinds(settings, num_layers, lambda index: FULL if has_rope[index] else SLIDING)
    fields = with_optional_windows(settings, fields, kinds)
    return with_layers(fields, rope=[0 if has else None for has in has_rope])


def _olmo2(settings: Settings) -> Fields:
    """Read OLMo-2: norms after attention and MLP instead of before, and on queries and keys of all heads."""
    return with_rope(settings, common(settings)) | {
        "qk_norm": "projection",
        "has_pre_norms": False,
        "has_post_norms": True,
        "norms_round_late": True,
    }


def _phi3(settings: Settings) -> Fields:
    """Read Phi-3 and Phi-4-mini: fused projections, and contexts that are lengthened by LongRoPE."""
    fields = with_rope(settings, common(settings), can_be_partial=True)
    return with_windows(settings, fields, [SLIDING] * fields["num_layers"])


FAMILIES = (
    Family("LlamaForCausalLM", ("llama",), _llama, {"max_position_embeddings": 2048}),
    Family(
        "MistralForCausalLM",
        ("mistral",),
        _mistral,
        {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    Family(
        "Ministral3ForCausalLM",
        ("ministral3",),
        _ministral3,
        {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144},
    ),
    Family("Qwen2ForCausalLM", ("qwen2",), _qwen2, _QWEN),
    Family("Qwen3ForCausalLM", ("qwen3", "qwen3_vl_text"), _qwen3, _QWEN),
    Family(
        "SmolLM3ForCausalLM",
        ("smollm3",),
        _smollm3,
        {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
    Family("Olmo2ForCausalLM", ("olmo2",), _olmo2, {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}),
    Family(
        "Phi3ForCausalLM",
        ("phi3",),
        _phi3,
        {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
        (
            Stored(r"self_attn\.qkv_proj", "self_attn.{}", ("q_proj", "k_proj", "v_proj"), "qkv"),
            Stored(r"mlp\.gate_up_proj", "mlp.{}", ("gate_proj", "up_proj")),
        ),
    ),
)
