"""Matrices packed for the CPU kernels: bf16, int8, or a stored low-bit format."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu.autotune import KERNELS, TILES, TORCH, MeasuredWays
from engine.cpu.library import Kernels, Program
from engine.cpu.structs import FormatName, Kind, Norm, ProductCall, Step, StoredRows
from engine.kernels.gated_mul import GatedActivation
from engine.layers.codes import Format, factors_of, format_of, pack
from engine.layers.layers import Before, RMSNorm, linear
from engine.weights.quantized_weight import QuantizedWeight

logger = logging.getLogger(__name__)

# T tokens, I input features, O output features, P panels of 16 outputs, N groups of inputs, C inputs of one group

_PANEL = 16
# Values of `enum Before` in product.h.
_NOTHING, _NORM = 0, 1
_ACTIVATIONS = {"silu": 2, "gelu": 3, "gelu_pytorch_tanh": 4, "swigluoai": 5, "relu2": 6}

NEVER = 1 << 62
# Rows that fill AMX tiles; decode steps reach this too.
_FULL_TILES = 32
# Rows that are measured, in descending order until the kernels win.
_ROWS = (2048, 512, 128, 64, _FULL_TILES)
# Smaller matrices are not measured: the overhead of a Python call exceeds any gain.
_LEAST_WEIGHTS = 1 << 17
# Maximum relative error of AMX products; different bf16 rounding orders differ by less.
_MOST_ERROR = 0.02
# Weights per chunk; larger chunks would spill from the cache to memory.
_WIDENED_AT_ONCE = 1 << 21

# Placeholder for matrices that are not low-bit.
_NO_FORMAT = Format(FormatName.Q4_0)


@dataclass(frozen=True)
class PackedPart:
    """Outputs of a matrix with one kind and format. tensors: memory that ProductCall points to, by field."""

    kind: Kind
    num_outputs: int
    # Packed inputs: a format with its own order may pad them.
    num_columns: int
    tensors: Mapping[str, Tensor]
    form: Format = _NO_FORMAT


class PackedMatrix:
    """Matrix (O, I) in the layout of matrix.h or formats.h.

    A row's product does not depend on the other rows, unless `measure` found AMX or torch faster from some number of
    rows on.
    """

    # CPU steps are not captured in graphs.
    is_fixed = False

    def __init__(self, kernels: Kernels, num_inputs: int, *parts: PackedPart) -> None:
        """Use the constructors `bf16`, `int8` and `few_bits`."""
        self._kernels = kernels
        self._parts = parts
        self.num_inputs = num_inputs
        self.num_outputs = sum(part.num_outputs for part in parts)
        self.num_bytes = sum(tensor.nbytes for part in parts for tensor in part.tensors.values())
        # From this many rows on, the kernels use AMX.
        self.tile_rows = NEVER
        # From this many rows on, torch multiplies dequantized weights.
        self.torch_rows = NEVER

    def measure(self, measured: MeasuredWays) -> None:
        """Measure the first part, or read a saved measurement, and apply the fastest way to all parts."""
        if self.num_outputs * self.num_inputs < _LEAST_WEIGHTS:
            return
        some, tiled = self._some(), self._some(tile_rows=0)
        has_tiles = self._has_tiles(some, tiled)
        kind, form = self._parts[0].kind, self._parts[0].form
        name = f"{form.name.name} in {form.group}" if kind is Kind.MULTIPLY_FEW_BITS else kind.name
        for num_rows in _ROWS:
            x_TI = torch.ones(num_rows, self.num_inputs, dtype=torch.bfloat16)
            ways = {KERNELS: partial(some.multiply, x_TI), TORCH: partial(some.multiply_by_torch, x_TI)}
            if has_tiles:
                ways[TILES] = partial(tiled.multiply, x_TI)
            workload = f"{name} {some.num_outputs} x {self.num_inputs}, {num_rows} rows"
            way = measured.quickest(workload, ways)
            if way == TORCH and self.tile_rows == NEVER:
                self.torch_rows = num_rows
            elif way == TILES:
                self.tile_rows = num_rows
            else:
                break
        if self.tile_rows == _FULL_TILES and kind is Kind.MULTIPLY_BF16:
            # Speculative steps and large batches must sum in the same order as steps of one row.
            self.tile_rows = 0

    def fix(self) -> None:
        """Use one summation order for any number of rows: that of AMX, if available.

        Integer products need no fixed order. Low-bit products keep the order without AMX, which groups rows differently
        (few_bits.h).
        """
        kind = self._parts[0].kind
        if kind is not Kind.MULTIPLY_FEW_BITS and self._has_tiles(self._some(), self._some(tile_rows=0)):
            self.tile_rows = 0 if kind is Kind.MULTIPLY_BF16 else _FULL_TILES

    def _some(self, *, tile_rows: int = NEVER) -> PackedMatrix:
        """Return a matrix of the first part's leading outputs, enough to measure."""
        first = self._parts[0]
        num_outputs = min(first.num_outputs, max(_PANEL, _WIDENED_AT_ONCE // self.num_inputs))
        matrix = PackedMatrix(self._kernels, self.num_inputs, replace(first, num_outputs=num_outputs))
        matrix.tile_rows = tile_rows
        return matrix

    def _has_tiles(self, some: PackedMatrix, tiled: PackedMatrix) -> bool:
        return self._kernels.has_tiles and _agree(some, tiled)

    @classmethod
    def bf16(cls, kernels: Kernels, weight_OI: Tensor) -> PackedMatrix:
        """Pack a matrix (O, I) of any float dtype, rounded to bf16."""
        panels_PN16C = kernels.memory.copy(_panels(weight_OI.to(torch.bfloat16), group=2))
        num_outputs, num_inputs = weight_OI.shape
        part = PackedPart(Kind.MULTIPLY_BF16, num_outputs, num_inputs, {"panels": panels_PN16C})
        return cls(kernels, num_inputs, part)

    @classmethod
    def int8(cls, kernels: Kernels, weight_OI: Tensor) -> PackedMatrix:
        """Quantize to 8 bits with one scale per output (symmetric, nearest).

        Activations are quantized per row at run time in the same way and multiplied as integers: exact except for these
        two roundings.
        """
        wide_OI = weight_OI.float()
        scales_O = wide_OI.abs().amax(dim=1).clamp_min(1e-30) / 127
        codes_OI = (wide_OI / scales_O.unsqueeze(1)).round().to(torch.int8)
        tensors = {
            "panels": kernels.memory.copy(_panels(codes_OI, group=4)),
            "scales": _pad(scales_O),
            "sums": _pad(codes_OI.sum(dim=1, dtype=torch.int32)),
        }
        num_outputs, num_inputs = weight_OI.shape
        return cls(kernels, num_inputs, PackedPart(Kind.MULTIPLY_INT8, num_outputs, num_inputs, tensors))

    @classmethod
    def few_bits(cls, kernels: Kernels, weights: Sequence[QuantizedWeight]) -> PackedMatrix | None:
        """Pack the rows of several low-bit weights as stored; None if the kernels lack one of their formats.

        Activations are quantized at run time with one scale per 32 inputs (16 for Q6_K and NVFP4) and multiplied as
        integers; with 8-bit floats they stay in bf16.
        """
        parts = []
        for form, alike in groupby(weights, key=format_of):
            if form is None:
                return None
            same = tuple(alike)
            tensors = {"panels": kernels.memory.copy(pack(same, form))}
            factors = [factors for weight in same if (factors := factors_of(weight, form)) is not None]
            if factors:
                tensors["scales"] = _pad(torch.cat(factors))
            if form.levels:
                tensors["levels"] = torch.frombuffer(bytearray(form.levels), dtype=torch.uint8)
            if (order_C := form.order_C) is not None:
                tensors["order"] = order_C
            num_columns = weights[0].shape[1] if order_C is None else len(order_C)
            num_outputs = sum(weight.shape[0] for weight in same)
            parts.append(PackedPart(Kind.MULTIPLY_FEW_BITS, num_outputs, num_columns, tensors, form))
        return cls(kernels, weights[0].shape[1], *parts)

    def rows(self, rows_T: Tensor) -> Tensor:
        """Return rows of a bf16 matrix, or dequantized ones of a low-bit matrix of one format: (T, I) bf16.

        rows_T: int64.
        """
        (part,) = self._parts
        if part.kind is Kind.MULTIPLY_BF16:
            words_PN16 = part.tensors["panels"].view(torch.int32).squeeze(-1)
            rows_TC = words_PN16[rows_T // _PANEL, :, rows_T % _PANEL].view(torch.bfloat16)
            return rows_TC[:, : self.num_inputs].contiguous()
        return self._stored_rows(part, rows_T.contiguous())

    def _widened(self, part: PackedPart, first: int, end: int) -> Tensor:
        """Dequantize outputs [first, end) of a part: (O, I) bf16. first: a multiple of 16."""
        if part.kind is Kind.MULTIPLY_FEW_BITS:
            return self._stored_rows(part, torch.arange(first, end))
        panels_PN16C = part.tensors["panels"][first // _PANEL : -(-end // _PANEL)]
        words_PN16 = panels_PN16C.view(torch.int32).squeeze(-1)
        rows_OI = words_PN16.transpose(1, 2).contiguous().view(panels_PN16C.dtype)
        rows_OI = rows_OI.flatten(0, 1)[: end - first, : self.num_inputs]
        if part.kind is Kind.MULTIPLY_BF16:
            return rows_OI
        return (rows_OI * part.tensors["scales"][first:end, None]).to(torch.bfloat16)

    def _stored_rows(self, part: PackedPart, rows_T: Tensor) -> Tensor:
        assert part.kind is Kind.MULTIPLY_FEW_BITS
        out_TC = torch.empty(len(rows_T), part.num_columns, dtype=torch.bfloat16)
        pointers = {name: tensor.data_ptr() for name, tensor in part.tensors.items()}
        stored = StoredRows(
            format=part.form.name,
            span=part.form.span,
            group=part.form.group,
            panels=pointers["panels"],
            levels=pointers.get("levels"),
            factors=pointers.get("scales"),
            inputs=part.num_columns,
            count=len(rows_T),
            rows=rows_T.data_ptr(),
            out=out_TC.data_ptr(),
        )
        self._kernels.widen_stored_rows(stored)
        if (order_C := part.tensors.get("order")) is None:
            return out_TC
        # Padding sorts before the inputs.
        return out_TC[:, order_C.argsort()[part.num_columns - self.num_inputs :]]

    def multiply(
        self,
        x_TI: Tensor,
        *,
        bias_O: Tensor | None = None,
        before: Before | None = None,
        residual_TO: Tensor | None = None,
    ) -> Tensor:
        """Implements engine.layers.layers.Matrix.multiply; all tensors are bf16."""
        if len(x_TI) >= self.torch_rows:
            return self.multiply_by_torch(x_TI, bias_O=bias_O, before=before, residual_TO=residual_TO)
        x_TI = x_TI.contiguous()
        out_TO = torch.empty(len(x_TI), self.num_outputs, dtype=torch.bfloat16)
        calls = self.calls(x_TI, out_TO, bias_O=bias_O, before=before, residual_TO=residual_TO)
        Program(self._kernels, list(calls)).run(Step(tokens=len(x_TI), undrafted=len(x_TI)))
        return out_TO

    def multiply_by_torch(
        self,
        x_TI: Tensor,
        *,
        bias_O: Tensor | None = None,
        before: Before | None = None,
        residual_TO: Tensor | None = None,
    ) -> Tensor:
        """Multiply with torch: weights are dequantized to bf16 in chunks, activations are not quantized."""
        x_TI = x_TI if before is None else before(x_TI)
        out_TO = torch.empty(len(x_TI), self.num_outputs, dtype=torch.bfloat16)
        at_once = max(_PANEL, _WIDENED_AT_ONCE // self.num_inputs // _PANEL * _PANEL)
        begin = 0
        for part in self._parts:
            for first in range(0, part.num_outputs, at_once):
                end = min(first + at_once, part.num_outputs)
                bias = None if bias_O is None else bias_O[begin + first : begin + end]
                out_TO[:, begin + first : begin + end] = linear(x_TI, self._widened(part, first, end), bias)
            begin += part.num_outputs
        return out_TO if residual_TO is None else residual_TO + out_TO

    def calls(
        self,
        x_TI: Tensor,
        out_TO: Tensor,
        *,
        bias_O: Tensor | None,
        before: Before | None,
        residual_TO: Tensor | None,
    ) -> Iterable[ProductCall]:
        """Yield the product as calls of a program whose rows are the step's tokens.

        `out_TO` may be the residual, and may be fp32.
        """
        match before:
            case RMSNorm():
                operation = {"before": _NORM, "norm": norm_argument(before)}
            case GatedActivation():
                operation = {"before": _ACTIVATIONS[before.kind], "alpha": before.alpha, "limit": before.limit}
            case None:
                operation = {"before": _NOTHING}
        first = 0
        for part in self._parts:
            yield ProductCall(
                kind=part.kind,
                format=part.form.name,
                span=part.form.span,
                group=part.form.group,
                outputs=part.num_outputs,
                inputs=part.num_columns,
                features=self.num_inputs,
                **operation,
                bias=_from(bias_O, first),
                residual=_from(residual_TO, first),
                x=x_TI.data_ptr(),
                out=_from(out_TO, first),
                out_stride=self.num_outputs,
                is_wide=out_TO.dtype == torch.float32,
                tile_rows=self.tile_rows,
                **{name: tensor.data_ptr() for name, tensor in part.tensors.items()},
            )
            first += part.num_outputs


def norm_argument(norm: RMSNorm) -> Norm:
    """Return the kernels' view of a norm."""
    return Norm(norm.weight.data_ptr(), norm.eps, norm.rounds_late)


def _agree(matrix: PackedMatrix, tiled: PackedMatrix) -> bool:
    """Return True if AMX products match the kernels' own; emulators and untested processors may not."""
    x_TI = torch.linspace(-2.0, 3.0, 40 * matrix.num_inputs).view(40, -1).to(torch.bfloat16)
    ours, theirs = matrix.multiply(x_TI).float(), tiled.multiply(x_TI).float()
    error = float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-30))
    if error > _MOST_ERROR:
        logger.error("AMX products are wrong, AMX disabled relative_error=%.3g", error)
    return error <= _MOST_ERROR


def _from(values: Tensor | None, first: int) -> int | None:
    """Return the address of output `first` of the first row."""
    return None if values is None else values.data_ptr() + first * values.element_size()


def _panels(weight_OI: Tensor, *, group: int) -> Tensor:
    """Arrange as panels (P, N, 16, C), padded with zeros."""
    num_outputs, num_inputs = weight_OI.shape
    padding = (0, -num_inputs % group, 0, -num_outputs % _PANEL)
    padded = F.pad(weight_OI, padding) if any(padding) else weight_OI.contiguous()
    # View each group as one word: ten times as fast as moving single codes.
    words_P16N = padded.view(torch.int32).view(-1, _PANEL, padded.shape[1] // group)
    words_PN16 = words_P16N.transpose(1, 2).contiguous()
    return words_PN16.unsqueeze(-1).view(weight_OI.dtype)


def _pad(values_O: Tensor) -> Tensor:
    """Pad to whole panels, because the kernels read 16 values at a time."""
    return F.pad(values_O, (0, -len(values_O) % _PANEL)).contiguous()
