"""Mixtral, Qwen2-MoE and Qwen3-MoE: experts with softmax scores; MiniMax-M2: with sigmoid scores."""

from __future__ import annotations

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
    with_experts_everywhere,
    with_optional_windows,
    with_rope,
    with_sparse,
    with_windows,
)
from core.model.settings import Settings
from core.model.shape import ExpertsConfig

# Mixtral's names of an expert's matrices.
MIXTRAL_EXPERTS = (
    Stored(pattern=r"block_sparse_moe\.gate", name="mlp.gate"),
    Stored(pattern=r"block_sparse_moe\.experts\.(\d+)\.w1", name="mlp.experts.{e}.gate_proj"),
    Stored(pattern=r"block_sparse_moe\.experts\.(\d+)\.w3", name="mlp.experts.{e}.up_proj"),
    Stored(pattern=r"block_sparse_moe\.experts\.(\d+)\.w2", name="mlp.experts.{e}.down_proj"),
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
    return with_sparse(fields, [i not in dense and (i + 1) % step == 0 for i in range(fields["num_layers"])])


def _minimax_m2(settings: Settings) -> Fields:
    """Read MiniMax-M2: norms over whole projections of queries and keys."""
    # Published files give the rotated features by number.
    if "rotary_dim" in settings and "partial_rotary_factor" not in settings:
        share = settings.count("rotary_dim") / settings.count("head_dim")
        settings = settings.replaced(partial_rotary_factor=share)
    fields = with_rope(settings, common(settings), can_be_partial=True)
    settings.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields["qk_norm"] = "projection" if settings.switch("use_qk_norm", True) else None
    return with_experts_everywhere(settings, fields, scores="sigmoid", has_correction_bias=True)


FAMILIES = (
    Family(
        architectures=("MixtralForCausalLM",),
        model_types=("mixtral",),
        read=_mixtral,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 131072},
        stored=MIXTRAL_EXPERTS,
    ),
    Family(
        architectures=("Qwen2MoeForCausalLM",),
        model_types=("qwen2_moe",),
        read=_qwen2_moe,
        defaults={"num_experts": 60, "num_experts_per_tok": 4, "max_position_embeddings": 32768}
        | {"intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    ),
    Family(
        architectures=("Qwen3MoeForCausalLM",),
        model_types=("qwen3_moe", "qwen3_vl_moe_text"),
        read=_qwen3_moe,
        defaults={"num_experts_per_tok": 8, "max_position_embeddings": 32768, "num_key_value_heads": 4}
        | {"intermediate_size": 6144, "moe_intermediate_size": 768},
        stored=stacked_experts(),
    ),
    Family(
        architectures=("MiniMaxM2ForCausalLM",),
        model_types=("minimax_m2",),
        read=_minimax_m2,
        defaults={"head_dim": 128, "rope_theta": 5e6, "num_key_value_heads": 8}
        | {"num_local_experts": 256, "num_experts_per_tok": 8, "max_position_embeddings": 196608},
        stored=(
            *MIXTRAL_EXPERTS,
            Stored(pattern=r"block_sparse_moe\.e_score_correction_bias", name="mlp.gate.e_score_correction_bias"),
        ),
    ),
)
