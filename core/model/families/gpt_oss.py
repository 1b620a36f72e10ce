"""gpt-oss: attention sinks, alternating windows, and experts with biases and a clamped activation."""

from __future__ import annotations

from core.model.families.family import (
    FULL,
    SLIDING,
    Family,
    Fields,
    Stored,
    common,
    layer_kinds,
    stacked_experts,
    with_default_rope,
    with_experts_everywhere,
    with_rope,
    with_windows,
)
from core.model.settings import Settings
from core.model.shape import Activation

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(settings: Settings) -> Fields:
    settings = with_default_rope(settings, _ROPE)
    fields = with_rope(settings, common(settings))
    alternate = layer_kinds(settings, fields["num_layers"], lambda index: FULL if index % 2 else SLIDING)
    fields = with_windows(settings, fields, alternate) | {"has_sinks": True}
    fields["activation"] = Activation(
        "swigluoai", settings.real("swiglu_alpha", 1.702), settings.real("swiglu_limit", 7.0)
    )
    # A softmax over the chosen experts only is one over all experts with normalized weights.
    return with_experts_everywhere(settings, fields, has_router_bias=True, has_bias=True)


FAMILIES = (
    Family(
        architectures=("GptOssForCausalLM",),
        model_types=("gpt_oss",),
        read=_gpt_oss,
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 4,
        },
        stored=(
            Stored(pattern=r"mlp\.router", name="mlp.gate"),
            # bf16 files: gate and up alternate in the columns of a transposed tensor.
            *stacked_experts(split="pairs", is_transposed=True),
            # MXFP4 files, whose experts the reader of quantized files presents one by one.
            Stored(
                pattern=r"mlp\.experts\.(\d+)\.gate_up_proj",
                name="mlp.experts.{e}.{}",
                parts=("gate_proj", "up_proj"),
                split="pairs",
            ),
        ),
    ),
)
