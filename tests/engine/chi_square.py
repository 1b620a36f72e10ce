"""Chi-square test of token frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# V vocabulary


def chi_square(ids: list[int], shares_V: Tensor) -> float:
    """Return the statistic in standard deviations (Wilson and Hilferty 1931). Rare tokens are pooled."""
    counts_V = torch.bincount(torch.tensor(ids), minlength=len(shares_V)).double()
    is_rare = shares_V * len(ids) < 10
    expected = torch.cat([shares_V[~is_rare], shares_V[is_rare].sum()[None]]) * len(ids)
    found = torch.cat([counts_V[~is_rare], counts_V[is_rare].sum()[None]])
    freedom = len(expected) - 1
    statistic = float(((found - expected) ** 2 / expected.clamp_min(1e-9)).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
