"""Rounding of a matrix in a format, group by group of inputs.

Without calibration, each number is rounded to nearest. With it, columns are rounded one after another, and each
column's error is compensated in the remaining columns, as far as inputs correlate (Frantar et al. 2022, "GPTQ",
arXiv:2210.17323). `gram` is the sum of x x^T over calibration inputs x, (I, I).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.quantization.formats import Coded, Scheme

# O outputs, I inputs, B columns of a block, G groups of inputs

# Columns rounded before their corrections are applied to later columns.
_BLOCK = 128
# Added to gram's diagonal, relative to its mean, for directions with few observations.
_DAMPING = 0.01


def round_matrix(weight_OI: Tensor, scheme: Scheme, gram_II: Tensor | None = None) -> Coded:
    """Round each number to nearest, or, with a gram, such that the products' error is small."""
    num_inputs = weight_OI.shape[1]
    group = scheme.group or num_inputs
    if gram_II is not None:
        return _compensated(weight_OI.float().clone(), scheme, group, gram_II)
    whole_OI = pad(weight_OI.float(), (0, -num_inputs % group))
    weight_GOS = torch.unflatten(whole_OI, 1, (-1, group)).transpose(0, 1).contiguous()
    scales_GO1, zeros_GO1 = scheme.choose(weight_GOS, torch.ones(group))
    numbers_OI = scheme.round(weight_GOS, scales_GO1, zeros_GO1).transpose(0, 1).flatten(1)[:, :num_inputs]
    zeros_OG = None if zeros_GO1 is None else zeros_GO1.squeeze(2).T
    return Coded(numbers_OI, scales_GO1.squeeze(2).T, zeros_OG, group)


def _compensated(left_OI: Tensor, scheme: Scheme, group: int, gram_II: Tensor) -> Coded:
    """Round columns in order. A group's scale is chosen at its first column, and so fits the compensated weights."""
    num_outputs, num_inputs = left_OI.shape
    factor_II, importance_I = _factor(gram_II), gram_II.diagonal()
    numbers_OI = torch.empty_like(left_OI)
    # One of each per group so far; no zeros if codes are symmetric.
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    # A block holds whole groups, so all corrections of a group's columns precede the choice of its scale.
    block = _BLOCK if group >= num_inputs else -(-_BLOCK // group) * group
    for start in range(0, num_inputs, block):
        end = min(start + block, num_inputs)
        errors_OB = torch.empty(num_outputs, end - start)
        for i in range(start, end):
            if i % group == 0:
                part_GOS = left_OI[:, i : i + group].unsqueeze(0)
                scales_GO1, zeros_GO1 = scheme.choose(part_GOS, importance_I[i : i + group])
                scales += scales_GO1
                zeros += [] if zeros_GO1 is None else zeros_GO1
            scales_O1, zeros_O1 = scales[-1], zeros[-1] if zeros else None
            column_O1 = left_OI[:, i : i + 1]
            number_O1 = scheme.round(column_O1, scales_O1, zeros_O1)
            rounded_O1 = (number_O1 if zeros_O1 is None else number_O1 - zeros_O1) * scales_O1
            numbers_OI[:, i : i + 1] = number_O1
            errors_OB[:, i - start : i - start + 1] = error_O1 = (column_O1 - rounded_O1) / factor_II[i, i]
            left_OI[:, i + 1 : end].addmm_(error_O1, factor_II[i : i + 1, i + 1 : end], alpha=-1)
        left_OI[:, end:].addmm_(errors_OB, factor_II[start:end, end:], alpha=-1)
    return Coded(numbers_OI, torch.cat(scales, 1), torch.cat(zeros, 1) if zeros else None, group)


def _factor(gram_II: Tensor) -> Tensor:
    """Return upper triangular U with U^T U = gram^-1. Row i distributes column i's error."""
    wide_II = gram_II.double()
    # An empty gram falls back to plain rounding.
    damping = _DAMPING * float(wide_II.diagonal().mean()) or 1.0
    wide_II = wide_II + damping * torch.eye(len(wide_II), dtype=torch.float64)
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(wide_II))
    factor_II: Tensor = torch.linalg.cholesky(inverse_II, upper=True)
    return factor_II.float()
