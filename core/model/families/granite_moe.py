"""Granite MoE: Granite with experts in every layer."""

from __future__ import annotations

from core.model.families.family import Family, Fields, Stored, with_sparse
from core.model.families.granite import granite
from core.model.settings import Settings
from core.model.shape import ExpertsConfig


def _granite_moe(settings: Settings) -> Fields:
    fields = granite(settings)
    fields["experts"] = ExpertsConfig(
        num_experts=settings.count("num_local_experts"),
        num_per_token=settings.count("num_experts_per_tok"),
        intermediate_size=fields["intermediate_size"],
        normalizes_weights=True,
    )
    return with_sparse(fields, [True] * fields["num_layers"])


FAMILIES = (
    Family(
        architectures=("GraniteMoeForCausalLM",),
        model_types=("granitemoe",),
        read=_granite_moe,
        defaults={"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
        stored=(
            Stored(pattern=r"block_sparse_moe\.router\.layer", name="mlp.gate"),
            Stored(
                pattern=r"block_sparse_moe\.input_linear",
                name="mlp.experts.{e}.{}",
                parts=("gate_proj", "up_proj"),
                has_experts=True,
            ),
            Stored(pattern=r"block_sparse_moe\.output_linear", name="mlp.experts.{e}.down_proj", has_experts=True),
        ),
    ),
)
