"""Rounding a matrix to few bits so that its products, not its numbers, stay close.

Column after column is rounded, and what that does to the products is made good by the columns that are still to come,
as far as inputs go together (Frantar et al. 2022, "GPTQ", arXiv:2210.17323). `gram` says how they do: the sum of x x^T
over inputs x that were seen, (I, I).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# O outputs, I inputs, B columns of a block

_BLOCK = 128  # columns whose corrections to later ones are added up before they are made
_DAMPING = 0.01  # of the mean of gram's diagonal, added to it: directions that were hardly seen

RoundColumn = Callable[[Tensor, int], Tensor]  # numbers (O,) of column i -> the nearest numbers that there are


def round_with_compensation(weight_OI: Tensor, gram_II: Tensor, round_column: RoundColumn) -> Tensor:
    """The numbers (O, I) fp32 that stand for the matrix, each as round_column has made it."""
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
    """U, upper triangular, with U^T U = gram^-1: row i says how column i's error is passed on."""
    wide_II = gram_II.double()
    damping = _DAMPING * float(wide_II.diagonal().mean()) or 1.0  # nothing was seen: plain rounding
    wide_II = wide_II + damping * torch.eye(len(wide_II), dtype=torch.float64)
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(wide_II))
    factor_II: Tensor = torch.linalg.cholesky(inverse_II, upper=True)
    return factor_II.float()
