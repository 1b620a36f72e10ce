"""Rounding of a matrix that keeps its products accurate, rather than its numbers.

Columns are rounded one after another. Each column's error is compensated in the remaining columns, as far as inputs
correlate (Frantar et al. 2022, "GPTQ", arXiv:2210.17323). `gram` is the sum of x x^T over calibration inputs x, (I, I).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# O outputs, I inputs, B columns of a block

# Columns rounded before their corrections are applied to later columns.
_BLOCK = 128
# Added to gram's diagonal, relative to its mean, for directions with few observations.
_DAMPING = 0.01

# Rounds the numbers (O,) of column i to the nearest representable ones.
RoundColumn = Callable[[Tensor, int], Tensor]


def round_with_compensation(weight_OI: Tensor, gram_II: Tensor, round_column: RoundColumn) -> Tensor:
    """Round the matrix column by column with `round_column`, compensating errors. Returns (O, I) fp32."""
    left_OI = weight_OI.float().clone()
    factor_II = _factor(gram_II)
    rounded_OI = torch.empty_like(left_OI)
    for start in range(0, left_OI.shape[1], _BLOCK):
        end = min(start + _BLOCK, left_OI.shape[1])
        errors_OB = torch.empty(left_OI.shape[0], end - start)
        for i in range(start, end):
            rounded_OI[:, i] = round_column(left_OI[:, i], i)
            error_O = (left_OI[:, i] - rounded_OI[:, i]) / factor_II[i, i]
            left_OI[:, i + 1 : end] -= torch.outer(error_O, factor_II[i, i + 1 : end])
            errors_OB[:, i - start] = error_O
        left_OI[:, end:] -= errors_OB @ factor_II[start:end, end:]
    return rounded_OI


def _factor(gram_II: Tensor) -> Tensor:
    """Return upper triangular U with U^T U = gram^-1. Row i distributes column i's error."""
    wide_II = gram_II.double()
    # An empty gram falls back to plain rounding.
    damping = _DAMPING * float(wide_II.diagonal().mean()) or 1.0
    wide_II = wide_II + damping * torch.eye(len(wide_II), dtype=torch.float64)
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(wide_II))
    factor_II: Tensor = torch.linalg.cholesky(inverse_II, upper=True)
    return factor_II.float()
