"""Safetensors checkpoints with quantized matrices, identified by their tensor names.

    FP8     weight e4m3; weight_scale_inv or weight_scale (O / block, I / block), or weight_scale (O, 1), or one number
    INT8    weight int8; weight_scale (O, 1) or (O, G), as compressed-tensors writes it
    AWQ     qweight (I, O / 8), qzeros (G, O / 8), scales (G, O); nibbles in the order below ("gemm")
    GPTQ    qweight (I / 8, O), qzeros (G, O / 8), scales (G, O), g_idx (I); nibbles in their own order

Packed numbers are int32, 8 nibbles each. Scales multiply. Activations are not quantized, even if the format allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.types.errors import SpecError
from engine.weights.checkpoint import Checkpoint, Shape, Span
from engine.weights.quantized_weight import GroupedWeight

# O outputs, I inputs, G groups of inputs

# Output j of eight is nibble _AWQ_ORDER[j].
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_IN_ORDER = tuple(range(8))
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_SCALES = ("weight_scale_inv", "weight_scale")
# Scales of activations.
_IGNORED = ("input_scale", "input_scale_ub", "activation_scale", "activation_scale_inv")


class QuantizedCheckpoint:
    """Implements Checkpoint: presents matrices under their unquantized names and shapes."""

    def __init__(self, plain: Checkpoint, config: Mapping[str, Any]) -> None:
        """config: quantization_config of config.json. Raises SpecError for unsupported formats."""
        self._plain = plain
        self._config = config
        self.shapes: dict[str, Shape] = {}
        for name, shape in plain.shapes.items():
            stem, _, last = name.rpartition(".")
            if last == "qweight":
                self.shapes[f"{stem}.weight"] = self._packed_shape(stem)
            elif last not in (*_PARTS, *_SCALES, *_IGNORED):
                self.shapes[name] = shape
        if any(name.endswith(".qweight") for name in plain.shapes) and config.get("bits", 4) != 4:
            raise SpecError(f"{config.get('quant_method')} with {config['bits']} bits is not supported; supported: 4")

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        weight = self.quantized(name, rows=rows, columns=columns)
        return self._plain.read(name, rows=rows, columns=columns) if weight is None else weight.rows(0, weight.shape[0])

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> GroupedWeight | None:
        stem = name.removesuffix(".weight")
        if f"{stem}.qweight" in self._plain.shapes:
            read: Callable[[str, Span, Span], GroupedWeight] = self._awq if self._is_awq else self._gptq
        elif scale := next((s for s in _SCALES if f"{stem}.{s}" in self._plain.shapes), None):
            read = self._scaled(f"{stem}.{scale}")
        else:
            return None
        shape = self.shapes[name]
        return read(stem, rows or (0, shape[0]), columns or (0, shape[1]))

    @property
    def _is_awq(self) -> bool:
        return self._config.get("quant_method") == "awq"

    @property
    def _block_size(self) -> tuple[int, int] | None:
        """Outputs and inputs that share a scale; None: one scale per output, or one for the matrix."""
        if block := self._config.get("weight_block_size"):
            return block[0], block[1]
        groups = self._config.get("config_groups") or {}
        for weights in (group.get("weights") or {} for group in groups.values()):
            if block := weights.get("block_structure"):
                return block[0], block[1]
            if weights.get("group_size"):
                return 1, weights["group_size"]
        return None

    def _packed_shape(self, stem: str) -> Shape:
        shape = self._plain.shapes[f"{stem}.qweight"]
        if len(shape) != 2:
            raise SpecError(f"{stem}.qweight has {len(shape)} dimensions, expected 2")
        first, second = shape
        return (second * 8, first) if self._is_awq else (second, first * 8)

    def _scaled(self, scale_name: str) -> Callable[[str, Span, Span], GroupedWeight]:
        """Return a reader for one scale per matrix, per output, or per block of outputs and inputs."""

        def read(stem: str, rows: Span, columns: Span) -> GroupedWeight:
            num_outputs, num_inputs = self.shapes[f"{stem}.weight"]
            scales = self._plain.read(scale_name).float()
            scales = scales.view(-1, 1) if scales.dim() < 2 else scales
            block_o, block_i = self._block_size or (1, num_inputs)
            # One scale for the whole matrix.
            if len(scales) == 1 and num_outputs > block_o:
                block_o = num_outputs
            if scales.shape != (-(-num_outputs // block_o), -(-num_inputs // block_i)):
                raise SpecError(f"{scale_name} has unsupported shape {tuple(scales.shape)}")
            codes_OI = self._plain.read(f"{stem}.weight", rows=rows, columns=columns)
            group_I = torch.arange(*columns) // block_i
            return GroupedWeight(codes_OI, scales[torch.arange(*rows) // block_o], None, group_I)

        return read

    def _awq(self, stem: str, rows: Span, columns: Span) -> GroupedWeight:
        codes_IO = _unpack(self._packed(f"{stem}.qweight", rows=columns), _AWQ_ORDER)
        zeros_GO = _unpack(self._packed(f"{stem}.qzeros"), _AWQ_ORDER).float()
        return self._four_bits(stem, codes_IO.T, zeros_GO, rows, columns)

    def _gptq(self, stem: str, rows: Span, columns: Span) -> GroupedWeight:
        codes_OI = _unpack(self._packed(f"{stem}.qweight").T, _IN_ORDER)[:, slice(*columns)]
        zeros_GO = _unpack(self._packed(f"{stem}.qzeros"), _IN_ORDER).float()
        if self._config.get("checkpoint_format", "gptq") == "gptq":
            # Version 1 of the format stores the zero minus one.
            zeros_GO += 1
        return self._four_bits(stem, codes_OI, zeros_GO, rows, columns)

    def _four_bits(self, stem: str, codes_OI: Tensor, zeros_GO: Tensor, rows: Span, columns: Span) -> GroupedWeight:
        """Build a 4-bit matrix. codes_OI: only the requested columns."""
        num_outputs, num_inputs = self.shapes[f"{stem}.weight"]
        scales_GO = self._part(f"{stem}.scales").float()
        num_groups = len(scales_GO)
        group_I = self._groups(stem, num_groups)
        is_known = group_I.shape == (num_inputs,) and bool(((group_I >= 0) & (group_I < num_groups)).all())
        if not is_known or not scales_GO.shape == zeros_GO.shape == (num_groups, num_outputs):
            raise SpecError(f"{stem}: scales, zeros and groups do not match shape ({num_outputs}, {num_inputs})")
        scales_OG, zeros_OG = (x_GO.T[slice(*rows)].contiguous() for x_GO in (scales_GO, zeros_GO))
        return GroupedWeight.of_4_bits(codes_OI[slice(*rows)], scales_OG, zeros_OG, group_I[slice(*columns)])

    def _groups(self, stem: str, num_groups: int) -> Tensor:
        """Return the group of each input, (I,). Without g_idx, groups are consecutive; the last may be smaller."""
        if f"{stem}.g_idx" in self._plain.shapes:
            return self._plain.read(f"{stem}.g_idx").long()
        num_inputs = self.shapes[f"{stem}.weight"][1]
        configured = self._config.get("group_size")
        size = configured if isinstance(configured, int) else -1
        # One group for all, no size given, or a size that does not apply to this matrix.
        if size < 1 or -(-num_inputs // size) != num_groups:
            if num_groups == 0 or num_inputs % num_groups:
                raise SpecError(f"{stem}: {num_inputs} inputs cannot be split into {num_groups} equal groups")
            size = num_inputs // num_groups
        return torch.arange(num_inputs) // size

    def _packed(self, name: str, *, rows: Span | None = None) -> Tensor:
        packed = self._part(name, rows=rows)
        if packed.dtype != torch.int32:
            raise SpecError(f"{name} has dtype {packed.dtype}, expected torch.int32")
        return packed

    def _part(self, name: str, *, rows: Span | None = None) -> Tensor:
        """Read one tensor of a 4-bit matrix."""
        if len(self._plain.shapes.get(name, ())) != 2:
            raise SpecError(f"{name} is missing or is not a matrix")
        return self._plain.read(name, rows=rows)


def _unpack(packed: Tensor, order: tuple[int, ...]) -> Tensor:
    """Unpack (N, M) int32 to (N, 8 M) of 0..15; number j of each eight is nibble order[j]."""
    shifts = torch.tensor(order, dtype=torch.int32) * 4
    return (packed.unsqueeze(-1) >> shifts & 15).flatten(1)
