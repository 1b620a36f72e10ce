"""Matrices packed for the CPU kernels: bf16 as they are stored, or int8."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu.library import Kernels, Program
from engine.cpu.structs import Kind, ProductCall, Step
from engine.layers.layers import Before, RMSNorm

# T tokens, I input features, O output features, P panels of 16 outputs, N groups of inputs, C inputs of one group

_PANEL = 16
_NOTHING, _NORM, _SILU = 0, 1, 2  # enum Before of matrix.h


class PackedMatrix:
    """A (O, I) matrix in the order of matrix.h. A row's product does not depend on the rows beside it."""

    def __init__(self, kernels: Kernels, kind: Kind, shape_OI: torch.Size, **parts: Tensor) -> None:
        """See `bf16` and `int8`. `parts`: what of the struct points to this matrix's own tensors."""
        self._kernels = kernels
        self._kind = kind
        self.num_outputs, self.num_inputs = shape_OI
        self._parts = parts

    @classmethod
    def bf16(cls, kernels: Kernels, weight_OI: Tensor) -> PackedMatrix:
        panels_PN16C = _panels(weight_OI.to(torch.bfloat16), group=2)
        return cls(kernels, Kind.MULTIPLY_BF16, weight_OI.shape, panels=panels_PN16C)

    @classmethod
    def int8(cls, kernels: Kernels, weight_OI: Tensor) -> PackedMatrix:
        """Each output's weights in 8 bits with a scale of their own (symmetric, nearest).

        Rows are quantised as they come, in the same way, and multiplied as integers: exact but for these two roundings.
        """
        wide_OI = weight_OI.float()
        scales_O = wide_OI.abs().amax(dim=1).clamp_min(1e-30) / 127
        codes_OI = (wide_OI / scales_O.unsqueeze(1)).round().to(torch.int8)
        return cls(
            kernels,
            Kind.MULTIPLY_INT8,
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
        """As engine.layers.layers.Matrix says; all tensors are bf16 and contiguous."""
        out_TO = torch.empty(len(x_TI), self.num_outputs, dtype=torch.bfloat16)
        call = self.call(x_TI, out_TO, bias_O=bias_O, before=before, residual_TO=residual_TO)
        Program(self._kernels, [call]).run(Step(tokens=len(x_TI)))
        return out_TO

    def call(
        self,
        x_TI: Tensor,
        out_TO: Tensor,
        *,
        bias_O: Tensor | None,
        before: Before | None,
        residual_TO: Tensor | None,
    ) -> ProductCall:
        """The same for a program, with the step's tokens as rows; `out_TO` may be the residual."""
        norm = before if isinstance(before, RMSNorm) else None
        return ProductCall(
            kind=self._kind,
            outputs=self.num_outputs,
            inputs=self.num_inputs,
            before=_NORM if norm else _NOTHING if before is None else _SILU,
            eps=norm.eps if norm else 0.0,
            norm=norm.weight.data_ptr() if norm else None,
            bias=None if bias_O is None else bias_O.data_ptr(),
            residual=None if residual_TO is None else residual_TO.data_ptr(),
            x=x_TI.data_ptr(),
            out=out_TO.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in self._parts.items()},
        )


def _panels(weight_OI: Tensor, *, group: int) -> Tensor:
    """-> (P, N, 16, C), padded with zeros."""
    num_outputs, num_inputs = weight_OI.shape
    padding = (0, -num_inputs % group, 0, -num_outputs % _PANEL)
    padded = F.pad(weight_OI, padding) if any(padding) else weight_OI.contiguous()
    words_P16N = padded.view(torch.int32).view(
        -1, _PANEL, padded.shape[1] // group
    )  # a group at once: ten times as fast
    words_PN16 = words_P16N.transpose(1, 2).contiguous()
    return words_PN16.unsqueeze(-1).view(weight_OI.dtype)


def _pad(values_O: Tensor) -> Tensor:
    """For whole panels: they are read 16 at a time."""
    return F.pad(values_O, (0, -len(values_O) % _PANEL)).contiguous()
