"""Safetensors checkpoints with quantized matrices, identified by their tensor names.

    FP8     weight e4m3; weight_scale_inv or weight_scale (O / block, I / block), or weight_scale (O, 1), or one number
    MXFP8   weight e4m3; weight_scale (O, I / 32), one byte b for 2^(b - 127)
    INT8    weight int8; weight_scale (O, 1) or (O, G), as compressed-tensors writes it; perhaps weight_zero_point like
            weight_scale, and weight_g_idx (I)
    AWQ     qweight (I, O / 8), qzeros (G, O / 8), scales (G, O); nibbles in the order below ("gemm")
    GPTQ    qweight (I b / 32, O), qzeros (G, O b / 32), scales (G, O), g_idx (I); codes of b = 2, 4 or 8 bits in order

Packed numbers are int32. Scales multiply. Activations are not quantized, even if the format allows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.model.weight_formats import INSTEAD
from core.types.errors import SpecError
from engine.weights.checkpoint import Shape, Span
from engine.weights.quantized_weight import GroupedWeight
from engine.weights.safetensors_checkpoint import FLOATS, SafetensorsCheckpoint

# O outputs, I inputs, G groups of inputs

# Output j of eight is nibble _AWQ_ORDER[j].
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_PACKED_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_SCALES = ("weight_scale_inv", "weight_scale")
_SCALED_PARTS = (*_SCALES, "weight_zero_point", "weight_g_idx")
_CODES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8")
_EXPONENTS = "F8_E8M0"
_GPTQ_BITS = (2, 4, 8)


class QuantizedCheckpoint:
    """Implements Checkpoint: presents matrices under their unquantized names and shapes."""

    def __init__(self, plain: SafetensorsCheckpoint, config: Mapping[str, Any]) -> None:
        """config: quantization_config of config.json. Raises SpecError for unsupported formats."""
        self._plain = plain
        self._config = config
        self.unindexed = plain.unindexed
        self._check_layout()
        self.shapes: dict[str, Shape] = {}
        for name, shape in plain.shapes.items():
            stem, _, last = name.rpartition(".")
            if last == "qweight":
                self.shapes[f"{stem}.weight"] = self._packed_shape(stem)
            elif last in _PACKED_PARTS and f"{stem}.qweight" in plain.shapes:
                continue
            elif last in _SCALED_PARTS and f"{stem}.weight" in plain.shapes:
                continue
            else:
                self.shapes[name] = shape
            if last == "weight":
                self._check_dtypes(stem)

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
    def _schemes(self) -> list[Mapping[str, Any]]:
        """Settings of the weights of each group of modules, as compressed-tensors writes them."""
        groups = (self._config.get("config_groups") or {}).values()
        return [{"format": group.get("format"), **(group.get("weights") or {})} for group in groups]

    @property
    def _has_exponents(self) -> bool:
        """True if scales that are bytes are exponents: E8M0, as in the OCP MX formats."""
        formats = [self._config.get("format"), *(scheme["format"] for scheme in self._schemes)]
        dtypes = [str(scheme.get("scale_dtype")) for scheme in self._schemes]
        return (
            self._config.get("quant_algo") == "MXFP8"
            or any(str(name).startswith("mxfp8") for name in formats)
            or any(name.endswith(("uint8", "e8m0fnu")) for name in dtypes)
        )

    def _check_layout(self) -> None:
        """Reject packings that only config.json tells from the supported ones."""
        method, config = self._config.get("quant_method"), self._config
        kind = str(config.get("version" if self._is_awq else "checkpoint_format") or "gemm").lower()
        if method in ("awq", "gptq") and kind not in ("gemm", "gptq", "gptq_v2"):
            raise SpecError(f"{method} in the layout {kind} is not supported; {INSTEAD}")
        block = config.get("weight_block_size")
        if block and not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
            raise SpecError(f"quantization_config.weight_block_size is {block!r}, and must be two numbers above 0")

    def _check_dtypes(self, stem: str) -> None:
        """Reject codes without a scale, and scales of an unknown dtype: they would be read as plain numbers."""
        dtypes, name = self._plain.dtypes, f"{stem}.weight"
        scale = next((s for s in _SCALES if f"{stem}.{s}" in dtypes), None)
        if scale is None:
            if dtypes[name] not in FLOATS:
                raise SpecError(f"{name} has dtype {dtypes[name]} and no scale beside it; {INSTEAD}")
            return
        kind = dtypes[f"{stem}.{scale}"]
        if dtypes[name] not in _CODES:
            raise SpecError(f"{name} has dtype {dtypes[name]} beside {scale}, expected FP8 or INT8 codes; {INSTEAD}")
        if kind not in (*FLOATS, _EXPONENTS) and not (kind == "U8" and self._has_exponents):
            raise SpecError(f"{stem}.{scale} has dtype {kind}, which is not supported for a scale; {INSTEAD}")

    def _bits(self, stem: str) -> int:
        """Return the bits of a packed matrix's codes. GPTQModel's `dynamic` overrides them by patterns of modules."""
        bits = self._config.get("bits", 4)
        for pattern, override in (self._config.get("dynamic") or {}).items():
            if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), stem):
                bits = override.get("bits", bits)
                break
        supported = (4,) if self._is_awq else _GPTQ_BITS
        if bits not in supported:
            known = " and ".join(map(str, supported))
            method = self._config.get("quant_method")
            raise SpecError(
                f"{stem}.qweight: {method} with {bits} bits is not supported; supported: {known}; {INSTEAD}"
            )
        return int(bits)

    def _blocks(self, scale_name: str, scales: Shape, shape: Shape) -> tuple[int, int]:
        """Return how many outputs and inputs share a scale, from the settings that fit its shape."""
        num_outputs, num_inputs = shape
        sizes = [self._config.get("weight_block_size"), *(scheme.get("block_structure") for scheme in self._schemes)]
        sizes += [(1, size) for scheme in self._schemes if (size := scheme.get("group_size") or 0) > 0]
        sizes += [(1, 32)] if self._has_exponents else []
        for block_o, block_i in [*filter(None, sizes), (1, num_inputs), (num_outputs, num_inputs)]:
            if scales == (-(-num_outputs // block_o), -(-num_inputs // block_i)):
                return block_o, block_i
        raise SpecError(f"{scale_name} has unsupported shape {scales}")

    def _packed_shape(self, stem: str) -> Shape:
        shape = self._plain.shapes[f"{stem}.qweight"]
        if len(shape) != 2:
            raise SpecError(f"{stem}.qweight has {len(shape)} dimensions, expected 2")
        (first, second), per_word = shape, 32 // self._bits(stem)
        return (second * per_word, first) if self._is_awq else (second, first * per_word)

    def _scaled(self, scale_name: str) -> Callable[[str, Span, Span], GroupedWeight]:
        """Return a reader for one scale per matrix, per output, or per block of outputs and inputs."""

        def read(stem: str, rows: Span, columns: Span) -> GroupedWeight:
            shape = self.shapes[f"{stem}.weight"]
            scales = self._scale(scale_name)
            block_o, block_i = self._blocks(scale_name, tuple(scales.shape), shape)
            codes_OI = self._plain.read(f"{stem}.weight", rows=rows, columns=columns)
            group_I = torch.arange(shape[1]) // block_i
            if (order := f"{stem}.weight_g_idx") in self._plain.shapes:
                group_I = self._order(order, group_I, scales.shape[1])
            taken = torch.arange(*rows) // block_o
            zeros_OG = self._zeros(f"{stem}.weight_zero_point", scales)
            zeros_OG = None if zeros_OG is None else zeros_OG[taken]
            return GroupedWeight(codes_OI, scales[taken], zeros_OG, group_I[slice(*columns)])

        return read

    def _scale(self, name: str) -> Tensor:
        """Read scales as numbers, with two dimensions."""
        stored = self._plain.read(name)
        if stored.dtype == torch.uint8:
            stored = stored.view(torch.float8_e8m0fnu)
        scales = stored.float()
        if not bool(scales.isfinite().all()):
            raise SpecError(f"{name} has a scale that is not a finite number; download the file again")
        return scales.view(-1, 1) if scales.dim() < 2 else scales

    def _zeros(self, name: str, scales: Tensor) -> Tensor | None:
        """Read zero points like the scales; None if there are none, or all are 0."""
        if name not in self._plain.shapes or not bool((zeros := self._plain.read(name).float()).any()):
            return None
        if zeros.numel() != scales.numel():
            raise SpecError(f"{name} has shape {tuple(zeros.shape)}, expected {tuple(scales.shape)}, as its scales")
        return zeros.view(scales.shape)

    def _order(self, name: str, in_order_I: Tensor, num_groups: int) -> Tensor:
        """Read the group of each input; -1 throughout stands for groups in order."""
        group_I = self._plain.read(name).long()
        if group_I.shape != in_order_I.shape or not bool(((group_I >= -1) & (group_I < num_groups)).all()):
            raise SpecError(f"{name} does not match {len(in_order_I)} inputs in {num_groups} groups")
        return in_order_I if bool((group_I < 0).any()) else group_I

    def _awq(self, stem: str, rows: Span, columns: Span) -> GroupedWeight:
        codes_IO = _unpack(self._packed(f"{stem}.qweight", rows=columns), 4, _AWQ_ORDER)
        zeros_GO = _unpack(self._packed(f"{stem}.qzeros"), 4, _AWQ_ORDER).float()
        return self._grouped(stem, codes_IO.T, zeros_GO, rows, columns)

    def _gptq(self, stem: str, rows: Span, columns: Span) -> GroupedWeight:
        bits = self._bits(stem)
        in_order = tuple(range(32 // bits))
        codes_OI = _unpack(self._packed(f"{stem}.qweight").T, bits, in_order)[:, slice(*columns)]
        zeros_GO = _unpack(self._packed(f"{stem}.qzeros"), bits, in_order).float()
        if self._config.get("checkpoint_format", "gptq") == "gptq":
            # Version 1 of the format stores the zero minus one.
            zeros_GO += 1
        return self._grouped(stem, codes_OI, zeros_GO, rows, columns)

    def _grouped(self, stem: str, codes_OI: Tensor, zeros_GO: Tensor, rows: Span, columns: Span) -> GroupedWeight:
        """Build a matrix of packed codes. codes_OI: only the requested columns."""
        num_outputs, num_inputs = self.shapes[f"{stem}.weight"]
        scales_GO = self._part(f"{stem}.scales").float()
        num_groups = len(scales_GO)
        group_I = self._groups(stem, num_groups)
        is_known = group_I.shape == (num_inputs,) and bool(((group_I >= 0) & (group_I < num_groups)).all())
        if not is_known or not scales_GO.shape == zeros_GO.shape == (num_groups, num_outputs):
            raise SpecError(f"{stem}: scales, zeros and groups do not match shape ({num_outputs}, {num_inputs})")
        scales_OG, zeros_OG = (x_GO.T[slice(*rows)].contiguous() for x_GO in (scales_GO, zeros_GO))
        codes_OI, group_I = codes_OI[slice(*rows)], group_I[slice(*columns)]
        if self._bits(stem) == 4:
            return GroupedWeight.of_4_bits(codes_OI, scales_OG, zeros_OG, group_I)
        return GroupedWeight(codes_OI.to(torch.uint8).contiguous(), scales_OG, zeros_OG, group_I)

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
        """Read one tensor of a packed matrix."""
        if len(self._plain.shapes.get(name, ())) != 2:
            raise SpecError(f"{name} is missing or is not a matrix")
        return self._plain.read(name, rows=rows)


def _unpack(packed: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """Unpack (N, M) int32 to (N, M * 32 / bits) codes; code j of each word is its order[j]-th from the low end."""
    shifts = torch.tensor(order, dtype=torch.int32) * bits
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)
