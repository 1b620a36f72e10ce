"""Matrices that a GPU multiplies in their stored low-bit formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.kernels.quant.code_panels import ROWS, CodePanels
from engine.kernels.quant.quantized_matmul import coded_product, launch_widen, new_counters
from engine.layers.code_parts import CodeRows, panels_of, rows_of
from engine.layers.layers import Before
from engine.weights.quantized_weight import QuantizedWeight

# T tokens, I input features, O output features

# From this many rows on, dequantizing the matrix first is faster.
_ROWS_WORTH_WIDENING = 512
# Weights per chunk.
_WIDENED_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class CodedPart:
    """Outputs stored in one format. order: inputs that the code columns belong to; None: in order."""

    panels: CodePanels
    counters: Tensor
    order_I: Tensor | None


class CodedMatrix:
    """Implements engine.layers.layers.Matrix. Used by one stream at a time."""

    is_fixed = True

    def __init__(self, *parts: CodedPart) -> None:
        self.parts = parts
        self.num_outputs = sum(part.panels.shape[0] for part in parts)
        self.num_bytes = sum(part.panels.num_bytes for part in parts)

    @classmethod
    def of(cls, weights: Sequence[QuantizedWeight], device: torch.device) -> CodedMatrix | None:
        """Concatenate the rows of several weights; None if one of them has an unsupported format."""
        rows = [part for weight in weights if (part := rows_of(weight, device)) is not None]
        if len(rows) < len(weights):
            return None
        runs: list[list[CodeRows]] = [[rows[0]]]
        for last, part in pairwise(rows):
            if part.is_like(last):
                runs[-1].append(part)
            else:
                runs.append([part])
        return cls(*(coded_part(panels_of(run), run[0].order_I) for run in runs))

    @classmethod
    def whole(cls, panels: CodePanels) -> CodedMatrix:
        """Build a matrix of one format with inputs in order."""
        return cls(coded_part(panels))

    @property
    def panels(self) -> CodePanels | None:
        """All rows as one set of panels; None if formats differ or inputs are permuted."""
        (first, *others) = self.parts
        return first.panels if first.order_I is None and not others else None

    def multiply(
        self,
        x_TI: Tensor,
        *,
        bias_O: Tensor | None = None,
        before: Before | None = None,
        residual_TO: Tensor | None = None,
    ) -> Tensor:
        if before is not None:
            x_TI = before(x_TI)
        out_TO = x_TI.new_empty(len(x_TI), self.num_outputs)
        first = 0
        for part in self.parts:
            own = slice(first, first + part.panels.shape[0])
            bias = None if bias_O is None else bias_O[own]
            residual = None if residual_TO is None else residual_TO[:, own]
            x = x_TI if part.order_I is None else x_TI.index_select(1, part.order_I)
            if x.is_cuda and len(x) >= _ROWS_WORTH_WIDENING:
                _multiply_widened(x, part.panels, bias, residual, out_TO[:, own])
            else:
                coded_product(x, part.panels, part.counters, bias_O=bias, residual_TO=residual, out_TO=out_TO[:, own])
            first = own.stop
        return out_TO


def coded_part(panels: CodePanels, order_I: Tensor | None = None) -> CodedPart:
    return CodedPart(panels, new_counters(panels.shape[0], panels.words.device), order_I)


def _multiply_widened(
    x_TI: Tensor, panels: CodePanels, bias_O: Tensor | None, residual_TO: Tensor | None, out_TO: Tensor
) -> None:
    """Multiply many rows: dequantize the outputs chunk by chunk, each once."""
    num_outputs, num_inputs = panels.shape
    step = max(1, _WIDENED_AT_ONCE // num_inputs // ROWS) * ROWS
    for start in range(0, num_outputs, step):
        own = slice(start, min(start + step, num_outputs))
        weight_IO = launch_widen(panels, start, own.stop, x_TI.dtype).T
        if bias_O is None:
            torch.mm(x_TI, weight_IO, out=out_TO[:, own])
        else:
            torch.addmm(bias_O[own], x_TI, weight_IO, out=out_TO[:, own])
    if residual_TO is not None:
        out_TO += residual_TO
