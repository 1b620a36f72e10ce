"""8-bit matrices multiplied with 8-bit activations on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.quant.code_panels import CodePanels
from engine.kernels.quant.code_words import INT8
from engine.kernels.quant.int8_matmul import DEPTH, launch_int8_product, launch_quantize_inputs
from engine.kernels.quant.quantized_matmul import new_counters
from engine.layers.code_parts import CodeRows, panels_of, rows_of
from engine.layers.layers import Before
from engine.weights.quantized_weight import GroupedWeight, QuantizedWeight

# T tokens, I input features, O output features


@dataclass(frozen=True)
class Int8Matrix:
    """Implements engine.layers.layers.Matrix. Used by one stream at a time.

    Weights have one scale per output (symmetric; nearest, or as stored). Activations are quantized per row at run time
    in the same way and multiplied as integers: exact except for these two roundings, as in engine/cpu/.
    """

    # Padded with zeros to the kernel's tile size.
    codes_OI: Tensor
    scales_O: Tensor
    num_inputs: int
    counters: Tensor

    @property
    def is_fixed(self) -> bool:
        return True

    @classmethod
    def of(cls, weight_OI: Tensor) -> Int8Matrix:
        codes_OI, scales_O = launch_quantize_inputs(weight_OI)
        return cls(codes_OI, scales_O, weight_OI.shape[1], new_counters(len(weight_OI), weight_OI.device))

    @classmethod
    def as_stored(cls, weights: Sequence[QuantizedWeight], device: torch.device) -> Int8Matrix | None:
        """Concatenate the rows of several weights; None if a format asks for other weights or activations."""
        asking = [each for each in weights if isinstance(each, GroupedWeight) and each.activations == torch.int8]
        rows = [part for weight in asking if (part := rows_of(weight, device)) and (part.kind, part.group) == (INT8, 0)]
        if len(rows) < len(weights):
            return None
        codes_OI = torch.cat([part.codes_OI for part in rows])
        padded_OI = F.pad(codes_OI, (0, -codes_OI.shape[1] % DEPTH)).view(torch.int8)
        scales_O = torch.cat([part.numbers["factors"].squeeze(1) for part in rows])
        return cls(padded_OI, scales_O, codes_OI.shape[1], new_counters(len(codes_OI), device))

    def panels(self) -> CodePanels:
        """Return the codes as panels for unquantized activations, as the expert kernels multiply them."""
        codes_OI = self.codes_OI[:, : self.num_inputs].view(torch.uint8)
        return panels_of([CodeRows(INT8, 0, codes_OI, {"factors": self.scales_O.unsqueeze(1)})])

    def multiply(
        self,
        x_TI: Tensor,
        *,
        bias_O: Tensor | None = None,
        before: Before | None = None,
        residual_TO: Tensor | None = None,
    ) -> Tensor:
        x_TI = x_TI if before is None else before(x_TI)
        return launch_int8_product(
            x_TI, self.codes_OI, self.scales_O, self.counters, bias_O=bias_O, residual_TO=residual_TO
        )
