"""Exact conversion of quantized weights to the code formats of the GPU kernels (code_panels.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.quant.code_panels import RUN, CodePanels, center_of, in_panels, pack_words, span_of
from engine.kernels.quant.code_words import E2M1, E4M3, INT8, LEVELS, NIBBLES
from engine.kernels.quant.row_quantization import as_bytes
from engine.layers.codes import codes_of, format_of
from engine.weights.quantized_weight import E2M1_LEVELS, GGMLWeight, GroupedWeight, QuantizedWeight, unpack_4_bits

# O outputs, I inputs, G groups of inputs

# Group sizes that the kernels support, in inputs.
_MOST, _LEAST = 128, 16


@dataclass(frozen=True)
class CodeRows:
    """Codes of some outputs, not yet in panels. kind, group, levels and numbers as in CodePanels, but (O, G) each.

    order: input that each code column belongs to; None if in order. activations: as in GroupedWeight.
    """

    kind: int
    group: int
    codes_OI: Tensor
    numbers: dict[str, Tensor]
    order_I: Tensor | None = None
    levels: tuple[float, ...] | None = None
    activations: torch.dtype | None = None

    def is_like(self, other: CodeRows) -> bool:
        """Return True if `panels_of` can concatenate both exactly."""
        in_order = self.order_I is None or other.order_I is None
        same = self.order_I is other.order_I if in_order else torch.equal(self.order_I, other.order_I)  # type: ignore[arg-type]
        return same and self._format() == other._format()

    def _format(self) -> object:
        # Scales of two bytes or more may differ in dtype: concatenation widens them exactly.
        numbers = [(name, each.element_size() == 1 and each.dtype) for name, each in self.numbers.items()]
        return self.kind, self.group, self.levels, self.activations, numbers


def rows_of(weight: QuantizedWeight, device: torch.device) -> CodeRows | None:
    """Return the codes and scales of a weight on the device; None if the kernels do not support its format."""
    if isinstance(weight, GroupedWeight):
        return _of_groups(weight.to(device))
    if not isinstance(weight, GGMLWeight) or format_of(weight) is None:
        return None
    return _of_blocks(GGMLWeight(weight.blocks_OB.to(device), weight.kind))


def panels_of(rows: Sequence[CodeRows]) -> CodePanels:
    """Concatenate rows of one format into panels."""
    first, codes_OI = rows[0], torch.cat([part.codes_OI for part in rows])
    words, high = pack_words(codes_OI, first.kind, first.group)
    numbers = {}
    for name, like in first.numbers.items():
        values_OG = torch.cat([as_bytes(part.numbers[name]) for part in rows])
        if name != "factors":
            values_OG = _narrowed(values_OG)
            num_groups = -(-codes_OI.shape[1] // RUN) * RUN // (RUN if name.startswith("super") else first.group)
            values_OG = F.pad(values_OG, (0, num_groups - values_OG.shape[1]))
        if like.element_size() == 1:
            values_OG = values_OG.view(like.dtype)
        numbers[name] = in_panels(values_OG, first.kind, first.group)
    shape = (codes_OI.shape[0], codes_OI.shape[1])
    return CodePanels(first.kind, first.group, shape, words, high=high, levels=first.levels, **numbers)


def _narrowed(values: Tensor) -> Tensor:
    """Convert fp32 to 16 bits if that is exact."""
    if values.dtype == torch.float32:
        for dtype in (torch.float16, torch.bfloat16):
            if torch.equal(values.to(dtype).float(), values):
                return values.to(dtype)
    return values


# ---- Groups: FP8, INT8, AWQ, GPTQ, NVFP4, MXFP4, NF4 ----


def _of_groups(weight: GroupedWeight) -> CodeRows | None:
    group_I, order_I, num_inputs = weight.group_I, None, weight.shape[1]
    # GPTQ groups may come in any order (act-order).
    if bool((group_I.diff() < 0).any()):
        order_I = group_I.argsort(stable=True)
        group_I = group_I[order_I]
    kind, levels, group = _kind(weight), None, _size(group_I)
    if kind is None or group is None or num_inputs < 1:
        return None
    if weight.levels is not None:
        levels = tuple(weight.levels.tolist())
    zeros_OG = _zeros(weight, kind)
    if zeros_OG is not None:
        # Corrections for zeros need groups.
        group = group or _MOST
    numbers = {}
    if group:
        numbers = _numbers(weight, zeros_OG, kind, group, group_I)
        if weight.factors_O is not None:
            numbers["factors"] = weight.factors_O.float().unsqueeze(1)
    else:
        factors_O = 1.0 if weight.factors_O is None else weight.factors_O
        numbers["factors"] = (weight.scales_OG[:, int(group_I[0])].float() * factors_O).unsqueeze(1)
    codes_OI = _codes(weight)
    codes_OI = codes_OI if order_I is None else codes_OI[:, order_I]
    return CodeRows(kind, group, codes_OI, numbers, order_I, levels, weight.activations)


def _kind(weight: GroupedWeight) -> int | None:
    is_whole = weight.codes.shape[1] == weight.shape[1]
    if weight.levels is not None:
        kind = E2M1 if weight.levels.tolist() == list(E2M1_LEVELS) else LEVELS
        return None if is_whole or weight.zeros_OG is not None else kind
    if weight.codes.dtype == torch.float8_e4m3fn:
        return E4M3 if weight.zeros_OG is None else None
    if is_whole:
        return INT8 if weight.codes.dtype in (torch.int8, torch.uint8) else None
    return NIBBLES


def _codes(weight: GroupedWeight) -> Tensor:
    """Return one byte per code: (O, I)."""
    if weight.codes.shape[1] == weight.shape[1]:
        return weight.codes ^ 128 if weight.codes.dtype == torch.uint8 else weight.codes.view(torch.uint8)
    return unpack_4_bits(weight.codes, weight.shape[1])


def _zeros(weight: GroupedWeight, kind: int) -> Tensor | None:
    """Return the zeros of unsigned nibbles or signed bytes; None if the kernels' codes have none."""
    if kind not in (INT8, NIBBLES):
        return None
    zeros_OG = torch.zeros_like(weight.scales_OG, dtype=torch.float32)
    if weight.zeros_OG is not None:
        zeros_OG = weight.zeros_OG.float()
    if kind == INT8 and weight.codes.dtype == torch.uint8:
        zeros_OG = zeros_OG - 128
    return None if bool((zeros_OG == center_of(kind)).all()) else zeros_OG


def _numbers(
    weight: GroupedWeight, zeros_OG: Tensor | None, kind: int, group: int, group_I: Tensor
) -> dict[str, Tensor]:
    index_G = group_I[::group]
    scales_OG = as_bytes(weight.scales_OG)[:, index_G]
    scales_OG = scales_OG.view(weight.scales_OG.dtype) if scales_OG.element_size() == 1 else scales_OG
    # The kernels read two bytes or more per span.
    if scales_OG.element_size() == 1 and span_of(kind) < 2 * group:
        scales_OG = scales_OG.float()
    numbers = {"scales": scales_OG}
    if zeros_OG is not None:
        zeros_OG = zeros_OG[:, index_G]
        zero_codes_OG = zeros_OG.clamp(0, 255).to(torch.uint8)
        if kind == NIBBLES and torch.equal(zero_codes_OG.float(), zeros_OG):
            numbers["leasts"] = zero_codes_OG
        else:
            numbers["leasts"] = -(zeros_OG * scales_OG.float())
    return numbers


def _size(group_I: Tensor) -> int | None:
    """Return the largest supported group size that divides all groups; 0: one group of all inputs; None: none fits."""
    changes = (group_I.diff() != 0).nonzero().flatten() + 1
    if not len(changes):
        return 0
    size = _MOST
    while size >= _LEAST and bool((changes % size).any()):
        size //= 2
    return size if size >= _LEAST else None


# ---- GGUF ----


def _of_blocks(weight: GGMLWeight) -> CodeRows:
    codes = codes_of(weight, 0, weight.shape[0])
    codes_OI = codes.codes_ONU32.flatten(1)
    if weight.kind.name in ("Q4_K", "Q5_K"):
        supers, super_leasts, scales, leasts = codes.heads
        numbers = {
            "scales": scales.flatten(1),
            "leasts": leasts.flatten(1),
            "supers": _halves(supers),
            "super_leasts": _halves(super_leasts),
        }
        return CodeRows(codes.bits, 32, codes_OI, numbers)
    if weight.kind.name == "Q6_K":
        supers, scales = codes.heads
        return CodeRows(6, 16, codes_OI, {"scales": scales.flatten(1).view(torch.int8), "supers": _halves(supers)})
    if codes.bits == 8:
        return CodeRows(INT8, 32, codes_OI ^ 128, {"scales": _halves(codes.heads[0])})
    names = ("scales", "leasts")[: len(codes.heads)]
    return CodeRows(
        codes.bits, 32, codes_OI, {name: _halves(head) for name, head in zip(names, codes.heads, strict=True)}
    )


def _halves(bytes_ONR2: Tensor) -> Tensor:
    """Reinterpret (O, N, R, 2) uint8 as (O, N R) fp16."""
    return bytes_ONR2.contiguous().view(torch.float16).flatten(1)
