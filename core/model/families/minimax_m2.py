"""MiniMax-M2: norms over whole projections of queries and keys, and experts with sigmoid scores."""

from __future__ import annotations

from core.model.families.family import Family, Fields, Stored, common, count_experts, with_rope, with_sparse
from core.model.families.mixtral import MIXTRAL_EXPERTS
from core.model.settings import Settings
from core.model.shape import ExpertsConfig


def _minimax_m2(settings: Settings) -> Fields:
    # Published files give the rotated features by number.
    if "rotary_dim" in settings and "partial_rotary_factor" not in settings:
        share = settings.count("rotary_dim") / settings.count("head_dim")
        settings = settings.replaced(partial_rotary_factor=share)
    fields = with_rope(settings, common(settings), can_be_partial=True)
    settings.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields["qk_norm"] = "projection" if settings.switch("use_qk_norm", True) else None
    fields["experts"] = ExpertsConfig(
        **count_experts(settings, "num_local_experts"),
        intermediate_size=fields["intermediate_size"],
        normalizes_weights=True,
        scores="sigmoid",
        has_correction_bias=True,
    )
    return with_sparse(fields, [True] * fields["num_layers"])


FAMILIES = (
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
