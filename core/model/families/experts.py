"""Experts instead of dense MLPs: Mixtral, Qwen2-MoE, Qwen3-MoE, MiniMax-M2, gpt-oss and Llama 4."""

from __future__ import annotations

from dataclasses import replace

from core.model.families.family import (
    FULL,
    SLIDING,
    Family,
    Fields,
    Stored,
    common,
    count_experts,
    layer_kinds,
    stacked_experts,
    with_default_rope,
    with_experts_everywhere,
    with_layers,
    with_optional_windows,
    with_rope,
    with_windows,
)
from core.model.settings import Settings
from core.model.shape import Activation, ExpertsConfig, QueryScaling

_CHUNKED = "chunked_attention"
# rope_theta is missing here, because it is a separate setting.
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Mixtral's names of an expert's matrices.
_MIXTRAL_EXPERTS = (
    Stored(r"block_sparse_moe\.gate", "mlp.gate"),
    Stored(r"block_sparse_moe\.experts\.(\d+)\.w1", "mlp.experts.{e}.gate_proj"),
    Stored(r"block_sparse_moe\.experts\.(\d+)\.w3", "mlp.experts.{e}.up_proj"),
    Stored(r"block_sparse_moe\.experts\.(\d+)\.w2", "mlp.experts.{e}.down_proj"),
)


def _mixtral(settings: Settings) -> Fields:
    fields = with_rope(settings, common(settings))
    fields |= {"has_qkv_bias": False, "has_output_bias": False}
    fields = with_windows(settings, fields, [SLIDING] * fields["num_layers"])
    return with_experts_everywhere(settings, fields)


def _qwen2_moe(settings: Settings) -> Fields:
    fields = with_rope(settings, common(settings))
    fields |= {"has_qkv_bias": fields["has_qkv_bias"] or settings.switch("qkv_bias", True)}
    num_layers, first = fields["num_layers"], settings.count("max_window_layers", 28, least=0)
    kinds = layer_kinds(settings, num_layers, lambda index: SLIDING if index % 2 == 0 and index < first else FULL)
    return with_qwen_experts(settings, with_optional_windows(settings, fields, kinds))


def _qwen3_moe(settings: Settings) -> Fields:
    fields = with_rope(settings, common(settings)) | {"qk_norm": "head"}
    return with_qwen_experts(settings, with_optional_windows(settings, fields, [SLIDING] * fields["num_layers"]))


def with_qwen_experts(settings: Settings, fields: Fields) -> Fields:
    """Add the experts of Qwen's models."""
    step, dense = settings.count("decoder_sparse_step", 1), settings.indices("mlp_only_layers") or ()
    shared = "shared_expert_intermediate_size"
    fields["experts"] = ExpertsConfig(
        **count_experts(settings, "num_experts" if "num_experts" in settings else "num_local_experts"),
        intermediate_size=settings.count("moe_intermediate_size"),
        normalizes_weights=settings.switch("norm_topk_prob"),
        shared_size=settings.count(shared, 0, least=0),
        has_shared_gate=shared in settings,
    )
    is_sparse = [i not in dense and (i + 1) % step == 0 for i in range(fields["num_layers"])]
    return with_layers(fields, is_sparse=is_sparse)


def _minimax_m2(settings: Settings) -> Fields:
    """Read MiniMax-M2: norms over whole projections of queries and keys, and sigmoid scores."""
    # Published files give the number of rotated features instead of their share.
    if "rotary_dim" in settings and "partial_rotary_factor" not in settings:
        share = settings.count("rotary_dim") / settings.count("head_dim")
        settings = settings.replaced(partial_rotary_factor=share)
    fields = with_rope(settings, common(settings), can_be_partial=True)
    settings.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields["qk_norm"] = "projection" if settings.switch("use_qk_norm", True) else None
    return with_experts_everywhere(settings, fields, scores="sigmoid", has_correction_bias=True)


def _gpt_oss(settings: Settings) -> Fields:
    """Read gpt-oss: attention sinks, alternating windows, and experts with biases and a clamped activation."""
    settings = with_default_rope(settings, _GPT_OSS_ROPE)
    fields = with_rope(settings, common(settings))
    alternate = layer_kinds(settings, fields["num_layers"], lambda index: FULL if index % 2 else SLIDING)
    fields = with_windows(settings, fields, alternate) | {"has_sinks": True}
    alpha, limit = settings.real("swiglu_alpha", 1.702), settings.real("swiglu_limit", 7.0)
    fields["activation"] = Activation("swigluoai", alpha, limit)
    # A softmax over the chosen experts equals one over all experts with normalized weights.
    return with_experts_everywhere(settings, fields, has_router_bias=True, has_bias=True)


def _llama4(settings: Settings) -> Fields:
    """Read Llama 4: attention in chunks, layers without rotation, and one routed expert beside a shared one."""
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
    if settings.switch("use_qk_norm", True):
        # The norm follows the rotation, so a factor of rotated features has no effect.
        ropes = tuple(replace(rope, attention_factor=1.0) for rope in fields["ropes"])
        fields |= {"qk_norm": "plain", "ropes": ropes}
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
    return with_layers(
        fields,
        rope=[0 if has else None for has in has_rope],
        has_qk_norm=list(map(bool, has_rope)),
        chunk=[chunk if kind == _CHUNKED else None for kind in kinds],
        scales_queries=[tunes and not has for has in has_rope],
        is_sparse=[index in sparse for index in range(num_layers)],
        intermediate_size=[settings.count("intermediate_size_mlp", size)] * num_layers,
    )


FAMILIES = (
    Family(
        "MixtralForCausalLM",
        ("mixtral",),
        _mixtral,
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 131072},
        _MIXTRAL_EXPERTS,
    ),
    Family(
        "Qwen2MoeForCausalLM",
        ("qwen2_moe",),
        _qwen2_moe,
        {"num_experts": 60, "num_experts_per_tok": 4, "max_position_embeddings": 32768}
        | {"intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    Family(
        "Qwen3MoeForCausalLM",
        ("qwen3_moe", "qwen3_vl_moe_text"),
        _qwen3_moe,
        {"num_experts_per_tok": 8, "max_position_embeddings": 32768, "num_key_value_heads": 4}
        | {"intermediate_size": 6144, "moe_intermediate_size": 768},
        stacked_experts(),
    ),
    Family(
        "MiniMaxM2ForCausalLM",
        ("minimax_m2",),
        _minimax_m2,
        {"head_dim": 128, "rope_theta": 5e6, "num_key_value_heads": 8}
        | {"num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608},
        (*_MIXTRAL_EXPERTS, Stored(r"block_sparse_moe\.e_score_correction_bias", "mlp.gate.e_score_correction_bias")),
    ),
    Family(
        "GptOssForCausalLM",
        ("gpt_oss",),
        _gpt_oss,
        {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "attention_bias": True, "rms_norm_eps": 1e-5}
        | {"rope_theta": 150000.0, "max_position_embeddings": 131072, "num_experts_per_tok": 4},
        (
            Stored(r"mlp\.router", "mlp.gate"),
            # bf16 files: gate and up alternate in the columns of a transposed tensor.
            *stacked_experts(split="pairs", is_transposed=True),
            # MXFP4 files, whose experts the reader of quantized files presents one by one.
            Stored(r"mlp\.experts\.(\d+)\.gate_up_proj", "mlp.experts.{e}.{}", ("gate_proj", "up_proj"), "pairs"),
        ),
    ),
    Family(
        "Llama4ForCausalLM",
        ("llama4_text",),
        _llama4,
        {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 202048, "hidden_size": 5120}
        | {"intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16}
        | {"num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        (
            Stored(r"self_attn\.(q_proj|k_proj)", "self_attn.{0}", split="rotary"),
            Stored(r"feed_forward\.router", "mlp.gate"),
            Stored(r"feed_forward\.(gate_proj|up_proj|down_proj)", "mlp.{0}"),
            Stored(r"feed_forward\.shared_expert\.(gate_proj|up_proj|down_proj)", "mlp.shared_experts.{0}"),
            # Quantized files keep the experts apart.
            Stored(r"feed_forward\.experts\.(\d+\.(?:gate|up|down)_proj)", "mlp.experts.{0}"),
            *stacked_experts(r"feed_forward\.experts", is_transposed=True),
        ),
    ),
)
