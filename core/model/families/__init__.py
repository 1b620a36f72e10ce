"""Tables of model families, one file each."""

from __future__ import annotations

from core.model.families import (
    deepseek,
    gemma,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite,
    granite_hybrid,
    granite_moe,
    lfm2,
    llama,
    llama4,
    minimax_m2,
    mixtral,
    nemotron_h,
    olmo2,
    phi3,
    qwen3_next,
    smollm3,
)
from core.model.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *mixtral.FAMILIES,
    *deepseek.FAMILIES,
    *gemma.FAMILIES,
    *gemma4.FAMILIES,
    *phi3.FAMILIES,
    *gpt_oss.FAMILIES,
    *granite.FAMILIES,
    *granite_moe.FAMILIES,
    *granite_hybrid.FAMILIES,
    *glm4_moe.FAMILIES,
    *minimax_m2.FAMILIES,
    *nemotron_h.FAMILIES,
    *llama4.FAMILIES,
    *olmo2.FAMILIES,
    *lfm2.FAMILIES,
    *qwen3_next.FAMILIES,
    *smollm3.FAMILIES,
)
