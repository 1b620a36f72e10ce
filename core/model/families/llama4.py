"""Llama 4: attention in chunks, layers without rotation, and one routed expert beside a shared one."""

from __future__ import annotations

from dataclasses import replace

from core.model.families.family import (
    FULL,
    Family,
    Fields,
    Stored,
    common,
    count_experts,
    layer_kinds,
    stacked_experts,
    with_rope,
)
from core.model.settings import Settings
from core.model.shape import ExpertsConfig, QueryScaling

_CHUNKED = "chunked_attention"


def _llama4(settings: Settings) -> Fields:
    fields = with_rope(settings, common(settings))
    num_layers, size = fields["num_layers"], fields["intermediate_size"]
    interval = settings.count("no_rope_layer_interval", 4)
    # An empty list counts as absent, as in transformers.
    is_listed = settings.get("no_rope_layers") != []
    has_rope = settings.per_layer("no_rope_layers", num_layers, (1, 0)) if is_listed else None
    has_rope = has_rope or [(index + 1) % interval != 0 for index in range(num_layers)]
    kinds = layer_kinds(settings, num_layers, lambda index: _CHUNKED if has_rope[index] else FULL, (_CHUNKED, FULL))
    step = settings.count("interleave_moe_layer_step", 1)
    listed = settings.indices("moe_layers")
    sparse = range(step - 1, num_layers, step) if listed is None else listed
    tunes, chunk = settings.switch("attn_temperature_tuning", True), settings.count("attention_chunk_size", 8192)
    fields["layers"] = tuple(
        replace(
            layer,
            rope=0 if has_rope[index] else None,
            has_qk_norm=bool(has_rope[index]),
            chunk=chunk if kinds[index] == _CHUNKED else None,
            scales_queries=tunes and not has_rope[index],
            is_sparse=index in sparse,
            intermediate_size=settings.count("intermediate_size_mlp", size),
        )
        for index, layer in enumerate(fields["layers"])
    )
    fields["qk_norm"] = "plain" if settings.switch("use_qk_norm", True) else None
    fields["query_scaling"] = QueryScaling(
        scale=settings.real("attn_scale", 0.1), interval=settings.count("floor_scale", 8192), offset=1
    )
    fields["experts"] = ExpertsConfig(
        **count_experts(settings, "num_local_experts", default=1),
        intermediate_size=size,
        normalizes_weights=False,
        shared_size=size,
        scores="sigmoid",
        weighs_inputs=True,
    )
    return fields


FAMILIES = (
    Family(
        architectures=("Llama4ForCausalLM",),
        model_types=("llama4_text",),
        read=_llama4,
        defaults={
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        stored=(
            Stored(pattern=r"self_attn\.(q_proj|k_proj)", name="self_attn.{0}", split="rotary"),
            Stored(pattern=r"feed_forward\.router", name="mlp.gate"),
            Stored(pattern=r"feed_forward\.(gate_proj|up_proj|down_proj)", name="mlp.{0}"),
            Stored(
                pattern=r"feed_forward\.shared_expert\.(gate_proj|up_proj|down_proj)", name="mlp.shared_experts.{0}"
            ),
            # Quantized files keep the experts apart.
            Stored(pattern=r"feed_forward\.experts\.(\d+\.(?:gate|up|down)_proj)", name="mlp.experts.{0}"),
            *stacked_experts(r"feed_forward\.experts", is_transposed=True),
        ),
    ),
)
