"""Matrices in low-bit formats on a GPU, for inputs in the activations' dtype or in 8 bits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu.autotune import FP8, KERNELS, MeasuredWays
from engine.kernels.language import has_tile_copies
from engine.kernels.quant.code_panels import ROWS, CodePanels
from engine.kernels.quant.code_words import E4M3, INT8
from engine.kernels.quant.int8_matmul import DEPTH, launch_int8_product, launch_quantize_inputs
from engine.kernels.quant.quantized_matmul import launch_coded_product, launch_widen, new_counters
from engine.layers.code_parts import CodeRows, panels_of, rows_of
from engine.layers.layers import Before
from engine.weights.quantized_weight import GroupedWeight, QuantizedWeight

logger = logging.getLogger(__name__)

# T tokens, I input features, O output features

# From this many rows on, cuBLAS with chunks dequantized before each product is faster.
_ROWS_WORTH_WIDENING = 512
# Rows per prompt step that are measured, in descending order until FP8 loses.
_ROWS_OF_PROMPTS = (2048, _ROWS_WORTH_WIDENING)
_NEVER = 1 << 62
# Outputs of an FP8 product are a multiple of this.
_FP8_OUTPUTS = 16
# Weights dequantized at a time.
_WIDENED_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class CodedPart:
    """Outputs stored in one format. order: inputs that the code columns belong to; None: in order.

    has_fp8_inputs: True if the format quantizes inputs to e4m3, and torch multiplies its codes with them.
    """

    panels: CodePanels
    counters: Tensor
    order_I: Tensor | None
    has_fp8_inputs: bool


class CodedMatrix:
    """Implements engine.layers.layers.Matrix in the stored formats. Used by one stream at a time.

    Products of many rows dequantize the matrix in chunks.
    """

    is_fixed = True

    def __init__(self, *parts: CodedPart) -> None:
        self.parts = parts
        self.num_outputs = sum(part.panels.shape[0] for part in parts)
        self.num_bytes = sum(part.panels.num_bytes for part in parts)
        # From this many rows on, inputs are quantized where the format asks for it.
        self.fp8_rows = _NEVER

    def measure(self, measured: MeasuredWays) -> None:
        """Measure FP8 products of prompts, or read a saved measurement, where the format asks for them."""
        for part in self.parts:
            num_outputs, num_inputs = part.panels.shape
            for num_rows in _ROWS_OF_PROMPTS if part.has_fp8_inputs else ():
                x_TI = torch.ones(num_rows, num_inputs, dtype=torch.bfloat16, device=part.panels.words.device)
                out_TO = x_TI.new_empty(num_rows, num_outputs)
                multiply = partial(_multiply_many, x_TI, part.panels, None, None, out_TO)
                ways = {KERNELS: multiply, FP8: partial(multiply, is_fp8=True)}
                try:
                    way = measured.quickest(f"FP8 {num_outputs} x {num_inputs}, {num_rows} rows", ways)
                except RuntimeError as error:
                    # torch supports some devices in some versions only.
                    logger.warning("FP8 products are not available, prompts use dequantized weights: %s", error)
                    return
                if way != FP8:
                    return
                self.fp8_rows = num_rows

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
        return cls(*(coded_part(panels_of(run), run[0].order_I, run[0].activations) for run in runs))

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
            if len(x) >= _ROWS_WORTH_WIDENING:
                is_fp8 = part.has_fp8_inputs and len(x) >= self.fp8_rows and x.dtype == torch.bfloat16
                _multiply_many(x, part.panels, bias, residual, out_TO[:, own], is_fp8=is_fp8)
            else:
                launch_coded_product(
                    x, part.panels, part.counters, bias_O=bias, residual_TO=residual, out_TO=out_TO[:, own]
                )
            first = own.stop
        return out_TO


def coded_part(panels: CodePanels, order_I: Tensor | None = None, activations: torch.dtype | None = None) -> CodedPart:
    """Build a part with new counters. activations: as in GroupedWeight."""
    counters = new_counters(panels.shape[0], panels.words.device)
    is_fp8 = panels.kind == E4M3 and not panels.group and activations == torch.float8_e4m3fn
    is_supported = has_tile_copies(panels.words.device) and panels.shape[0] % _FP8_OUTPUTS == 0
    return CodedPart(panels, counters, order_I, is_fp8 and is_supported)


def _multiply_many(
    x_TI: Tensor,
    panels: CodePanels,
    bias_O: Tensor | None,
    residual_TO: Tensor | None,
    out_TO: Tensor,
    *,
    is_fp8: bool = False,
) -> None:
    """Multiply many rows, a chunk of outputs at a time: dequantized, or as e4m3 codes with inputs quantized to e4m3.

    FP8 rows have a scale each, the largest number / 448. torch sums the codes' products in fp32.
    """
    num_outputs, num_inputs = panels.shape
    step = max(1, _WIDENED_AT_ONCE // num_inputs // ROWS) * ROWS
    if is_fp8:
        codes_TI, scales_T = launch_quantize_inputs(x_TI, torch.float8_e4m3fn)
        assert panels.factors is not None
        factors_O = panels.factors.flatten()
    for start in range(0, num_outputs, step):
        own = slice(start, min(start + step, num_outputs))
        bias = None if bias_O is None else bias_O[own]
        if is_fp8:
            weight_OI = launch_widen(panels, start, own.stop, torch.float8_e4m3fn)
            by_row = F.ScalingType.RowWise
            scales = scales_T.unsqueeze(1), factors_O[own].unsqueeze(0)
            out_TO[:, own] = F.scaled_mm(codes_TI, weight_OI.T, scales[0], by_row, scales[1], by_row, bias=bias)
        elif bias is None:
            torch.mm(x_TI, launch_widen(panels, start, own.stop, x_TI.dtype).T, out=out_TO[:, own])
        else:
            torch.addmm(bias, x_TI, launch_widen(panels, start, own.stop, x_TI.dtype).T, out=out_TO[:, own])
    if residual_TO is not None:
        out_TO += residual_TO


@dataclass(frozen=True)
class Int8Matrix:
    """Implements engine.layers.layers.Matrix with 8-bit inputs. Used by one stream at a time.

    Weights have one scale per output (symmetric; nearest, or as stored). Activations are quantized per row at run time
    in the same way and multiplied as integers: exact except for these two roundings, as in engine/cpu/.
    """

    is_fixed = True

    # Padded with zeros to the kernel's tile size.
    codes_OI: Tensor
    scales_O: Tensor
    num_inputs: int
    counters: Tensor

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
