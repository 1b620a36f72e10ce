"""Conversion of quantized weights to the few code formats of the GPU kernels, without changing their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.quant.code_panels import RUN, CodePanels, in_panels, pack_words
from engine.kernels.quant.code_words import E4M3, INT8
from engine.layers.codes import codes_of, format_of
from engine.weights.quantized_weight import GGMLWeight, GroupedWeight, QuantizedWeight

# O outputs, I inputs, G groups of inputs

# Group sizes that the kernels support, in inputs.
_MOST, _LEAST = 128, 16
_KINDS = {torch.float8_e4m3fn: E4M3, torch.int8: INT8}


@dataclass(frozen=True)
class CodeRows:
    """Codes of some outputs, not yet in panels. kind, group and numbers as in CodePanels, but (O, G) each.

    order: input that each code column belongs to; None if in order.
    """

    kind: int
    group: int
    codes_OI: Tensor
    numbers: dict[str, Tensor]
    order_I: Tensor | None = None

    def is_like(self, other: CodeRows) -> bool:
        ours = [(name, numbers.dtype) for name, numbers in self.numbers.items()]
        theirs = [(name, numbers.dtype) for name, numbers in other.numbers.items()]
        in_order = self.order_I is None or other.order_I is None
        same = self.order_I is other.order_I if in_order else torch.equal(self.order_I, other.order_I)  # type: ignore[arg-type]
        return (self.kind, self.group, ours, same) == (other.kind, other.group, theirs, True)


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
    num_inputs = codes_OI.shape[1]
    numbers = {}
    for name in first.numbers:
        size = RUN if name.startswith("super") else first.group or num_inputs
        values_OG = torch.cat([part.numbers[name] for part in rows])
        padding = 0 if size == num_inputs else -(-num_inputs // RUN) * RUN // size - values_OG.shape[1]
        numbers[name] = in_panels(F.pad(values_OG, (0, padding)), size)
    return CodePanels(first.kind, first.group, tuple(codes_OI.shape), words, high=high, **numbers)  # type: ignore[arg-type]


# ---- FP8, INT8, AWQ and GPTQ ----


def _of_groups(weight: GroupedWeight) -> CodeRows | None:
    if weight.levels is not None or weight.factors_O is not None:
        return None
    group_I, order_I, num_inputs = weight.group_I, None, weight.shape[1]
    # GPTQ groups may come in any order (act-order).
    if bool((group_I.diff() < 0).any()):
        order_I = group_I.argsort(stable=True)
        group_I = group_I[order_I]
    group = _size(group_I)
    if group is None or (num_inputs < 1):
        return None
    scales_OG, zeros_OG = (
        None if values is None else values[:, group_I[:: group or num_inputs]]
        for values in (weight.scales_OG.float(), weight.zeros_OG)
    )
    assert scales_OG is not None
    kind, codes_OI = _KINDS.get(weight.codes.dtype), weight.codes
    if kind is not None and zeros_OG is None:
        codes_OI = codes_OI.view(torch.uint8)
        return CodeRows(kind, group, _taken(codes_OI, order_I), {"scales": scales_OG}, order_I)
    if weight.codes.dtype != torch.uint8 or weight.codes.shape[1] == num_inputs or zeros_OG is None:
        return None
    if not group:
        return _of_groups_of(weight, _MOST)
    zero_codes_OG = zeros_OG.clamp(0, 255).to(torch.uint8)
    if not torch.equal(zero_codes_OG.float(), zeros_OG):
        return None
    halves_OG = scales_OG.half()
    scales = halves_OG if torch.equal(halves_OG.float(), scales_OG) else scales_OG
    codes_OI = torch.stack((codes_OI & 15, codes_OI >> 4), dim=-1).flatten(1)[:, :num_inputs]
    return CodeRows(4, group, _taken(codes_OI, order_I), {"scales": scales, "leasts": zero_codes_OG}, order_I)


def _of_groups_of(weight: GroupedWeight, size: int) -> CodeRows | None:
    """Split a weight with one scale per output into smaller groups with equal scales."""
    assert weight.zeros_OG is not None
    num_inputs = weight.shape[1]
    index_G = weight.group_I[::size]
    group_I = torch.arange(num_inputs, device=index_G.device) // size
    # A group of _MOST would again cover all inputs.
    if num_inputs <= size:
        group_I, index_G = torch.arange(num_inputs, device=index_G.device) // _LEAST, weight.group_I[::_LEAST]
    if len(index_G) < 2:
        return None
    return _of_groups(GroupedWeight(weight.codes, weight.scales_OG[:, index_G], weight.zeros_OG[:, index_G], group_I))


def _size(group_I: Tensor) -> int | None:
    """Return the largest supported group size that divides all groups; 0: one group of all inputs; None: none fits."""
    changes = (group_I.diff() != 0).nonzero().flatten() + 1
    if not len(changes):
        return 0
    size = _MOST
    while size >= _LEAST and bool((changes % size).any()):
        size //= 2
    return size if size >= _LEAST else None


def _taken(codes_OI: Tensor, order_I: Tensor | None) -> Tensor:
    return codes_OI if order_I is None else codes_OI[:, order_I]


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
