"""Granite MoE: Granite with experts in every layer."""

from __future__ import annotations

from core.model.families.family import (
    Family,
    Fields,
    Stored,
    count_experts,
    stacked_experts,
    with_sparse,
)
from core.model.families.granite import granite
from core.model.settings import Settings
from core.model.shape import ExpertsConfig


def _granite_moe(settings: Settings) -> Fields:
    fields = granite(settings)
    fields["experts"] = ExpertsConfig(
        **count_experts(settings, "num_local_experts"),
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
            *stacked_experts("block_sparse_moe", names=("input_linear", "output_linear")),
        ),
    ),
)
