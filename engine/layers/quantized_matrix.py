"""Matrices that stay quantized in memory and are dequantized in slices for each product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.layers import Before, linear
from engine.weights.quantized_weight import QuantizedWeight

# T tokens, I input features, O output features

# Weights per slice; bounds the memory that a product needs beside the matrix.
_WIDENED_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class QuantizedMatrix:
    """Implements engine.layers.layers.Matrix. Several weights of equal width form one matrix of all their rows.

    Weights are rounded to the activations' dtype before the product, as in dequantization at load. Products are
    identical; it saves memory, but is slower on a CPU.
    """

    weights: tuple[QuantizedWeight, ...]

    @property
    def is_fixed(self) -> bool:
        return False

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
        parts = [self._product(x_TI, weight) for weight in self.weights]
        product_TO = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if bias_O is not None:
            product_TO = product_TO + bias_O
        return product_TO if residual_TO is None else residual_TO + product_TO

    @staticmethod
    def _product(x_TI: Tensor, weight: QuantizedWeight) -> Tensor:
        num_outputs, num_inputs = weight.shape
        step = max(1, _WIDENED_AT_ONCE // num_inputs)
        slices = ((start, min(start + step, num_outputs)) for start in range(0, num_outputs, step))
        parts = [linear(x_TI, weight.rows(*span).to(device=x_TI.device, dtype=x_TI.dtype)) for span in slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
