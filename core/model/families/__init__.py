"""Tables of model families."""

from __future__ import annotations

from core.model.families import deepseek, experts, gemma, granite, hybrid, llama
from core.model.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *llama.FAMILIES,
    *experts.FAMILIES,
    *deepseek.FAMILIES,
    *gemma.FAMILIES,
    *granite.FAMILIES,
    *hybrid.FAMILIES,
)
