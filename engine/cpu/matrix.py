"""Matrices packed for the CPU kernels: bf16 as they are stored, or int8."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu.library import Kernels, Product
from engine.layers import Before, RMSNorm

# T tokens, I input features, O output features, P panels of 16 outputs, N groups of inputs, C inputs of one group

_PANEL = 16
_NOTHING, _NORM, _SILU = 0, 1, 2  # enum Before of matrix.h


class PackedMatrix:
    """A (O, I) matrix in the order of matrix.h. A row's product does not depend on the rows beside it.

    Owned by the step thread: the arguments of a call are kept and filled in again.
    """

    def __init__(self, function: Callable[[Any], None], shape_OI: torch.Size, **parts: Tensor) -> None:
        """See `bf16` and `int8`. `parts`: what of the struct points to this matrix's own tensors."""
        self._function = function
        self._parts = parts  # keeps their memory
        addresses = {name: tensor.data_ptr() for name, tensor in parts.items()}
        self._product = Product(outputs=shape_OI[0], inputs=shape_OI[1], **addresses)
        self._reference = byref(self._product)

    @classmethod
    def bf16(cls, kernels: Kernels, weight_OI: Tensor) -> PackedMatrix:
        panels_PN16C = _panels(weight_OI.to(torch.bfloat16), group=2)
        return cls(kernels.multiply_bf16, weight_OI.shape, panels=panels_PN16C)

    @classmethod
    def int8(cls, kernels: Kernels, weight_OI: Tensor) -> PackedMatrix:
        """Each output's weights in 8 bits with a scale of their own (symmetric, nearest).

        Rows are quantised as they come, in the same way, and multiplied as integers: exact but for these two roundings.
        """
        wide_OI = weight_OI.float()
        scales_O = wide_OI.abs().amax(dim=1).clamp_min(1e-30) / 127
        codes_OI = (wide_OI / scales_O.unsqueeze(1)).round().to(torch.int8)
        return cls(
            kernels.multiply_int8,
            weight_OI.shape,
            panels=_panels(codes_OI, group=4),
            scales=_pad(scales_O),
            sums=_pad(codes_OI.sum(dim=1, dtype=torch.int32)),
        )

    def multiply(
        self,
        x_TI: Tensor,
        *,
        bias_O: Tensor | None = None,
        before: Before | None = None,
        residual_TO: Tensor | None = None,
    ) -> Tensor:
        """As engine.layers.Matrix says; all tensors are bf16 and contiguous."""
        product, num_rows = self._product, x_TI.shape[0]
        out_TO = torch.empty(num_rows, product.outputs, dtype=torch.bfloat16)
        if isinstance(before, RMSNorm):
            product.before, product.eps, product.norm = _NORM, before.eps, before.weight.data_ptr()
        else:
            product.before = _NOTHING if before is None else _SILU
        product.bias = None if bias_O is None else bias_O.data_ptr()
        product.residual = None if residual_TO is None else residual_TO.data_ptr()
        product.x, product.out = x_TI.data_ptr(), out_TO.data_ptr()
        product.rows, product.threads = num_rows, torch.get_num_threads()
        self._function(self._reference)
        return out_TO


def _panels(weight_OI: Tensor, *, group: int) -> Tensor:
    """-> (P, N, 16, C), padded with zeros."""
    num_outputs, num_inputs = weight_OI.shape
    padded = F.pad(weight_OI, (0, -num_inputs % group, 0, -num_outputs % _PANEL))
    return padded.view(-1, _PANEL, padded.shape[1] // group, group).transpose(1, 2).contiguous()


def _pad(values_O: Tensor) -> Tensor:
    """For whole panels: they are read 16 at a time."""
    return F.pad(values_O, (0, -len(values_O) % _PANEL)).contiguous()
