"""Tables of model families."""

from __future__ import annotations

from core.model.families import (
    deepseek,
    gemma,
    gemma4,
    gpt_oss,
    granite,
    granite_moe,
    lfm2,
    llama,
    llama4,
    mixtral,
    nemotron_h,
    qwen3_next,
)
from core.model.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *mixtral.FAMILIES,
    *deepseek.FAMILIES,
    *gemma.FAMILIES,
    *gemma4.FAMILIES,
    *gpt_oss.FAMILIES,
    *granite.FAMILIES,
    *granite_moe.FAMILIES,
    *nemotron_h.FAMILIES,
    *llama4.FAMILIES,
    *lfm2.FAMILIES,
    *qwen3_next.FAMILIES,
)
