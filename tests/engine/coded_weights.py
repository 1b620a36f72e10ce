"""Random matrices in every low-bit format."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.model.gguf_file import GGML_TYPES
from engine.weights.quantized_weight import E2M1_LEVELS, GGMLWeight, GroupedWeight, QuantizedWeight, pack_4_bits

OF_GGUF = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
# Offsets of the half-precision scales in a block.
HALVES_AT = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
HALVES_AT |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# Numbers of NF4, Dettmers et al. 2023, arXiv:2305.14314, appendix E.
NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)

# bitsandbytes' table.
FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
FP4 += tuple(-number for number in FP4)


@dataclass(frozen=True)
class Grouped:
    """Format of a GroupedWeight. size: inputs per group; None: all. zeros: None, "whole" or "broken" numbers."""

    codes: torch.dtype | None
    size: int | None
    scales: torch.dtype = torch.float32
    zeros: str | None = None
    levels: tuple[float, ...] | None = None
    has_factors: bool = False
    order: str = "consecutive"  # "any": of the inputs; "unequal": groups of unequal sizes, too


GROUPED = {
    "fp8 channels": Grouped(torch.float8_e4m3fn, None),
    "fp8 blocks": Grouped(torch.float8_e4m3fn, 128),
    "fp8 blocks of powers": Grouped(torch.float8_e4m3fn, 128, torch.float8_e8m0fnu),
    "mxfp8": Grouped(torch.float8_e4m3fn, 32, torch.float8_e8m0fnu),
    "int8 channels": Grouped(torch.int8, None, torch.bfloat16),
    "int8 groups": Grouped(torch.int8, 32, torch.float16),
    "int8 with zeros": Grouped(torch.uint8, 64, torch.bfloat16, zeros="whole"),
    "int8 channels with zeros": Grouped(torch.int8, None, torch.float16, zeros="whole"),
    "nvfp4": Grouped(None, 16, torch.float8_e4m3fn, levels=E2M1_LEVELS, has_factors=True),
    "mxfp4": Grouped(None, 32, torch.float8_e8m0fnu, levels=E2M1_LEVELS),
    "nf4": Grouped(None, 64, levels=NF4),
    "int4 channels": Grouped(None, None, torch.bfloat16),
    "int4 in groups of 32": Grouped(None, 32, torch.bfloat16),
    "groups of 16": Grouped(None, 16, torch.float16, zeros="whole"),
    "groups of 64": Grouped(None, 64, torch.bfloat16, zeros="whole"),
    "groups of 128": Grouped(None, 128, torch.float16, zeros="whole"),
    "groups of 256": Grouped(None, 256, torch.float16, zeros="whole"),
    "one group": Grouped(None, None, torch.float16, zeros="whole"),
    "broken zeros": Grouped(None, 128, torch.float16, zeros="broken"),
    "groups in any order": Grouped(None, 32, torch.float16, zeros="whole", order="any"),
    "nf4 in any order": Grouped(None, 32, levels=NF4, order="any"),
}
# Further forms, which only the CPU kernels hold by themselves.
MORE = {
    "int8 channels, float32": Grouped(torch.int8, None),
    "int4 channels, float32": Grouped(None, None),
    "groups of 64, float32": Grouped(None, 64, zeros="whole"),
    "groups of 32": Grouped(None, 32, torch.float16, zeros="whole"),
    "groups of 32, symmetric": Grouped(None, 32, torch.float16),
    "unequal groups": Grouped(None, 64, torch.float16, zeros="whole", order="unequal"),
    "fp4": Grouped(None, 128, levels=FP4),
}


def random_weight(
    name: str, num_outputs: int, num_inputs: int, *, seed: int = 0, has_every_float: bool = False
) -> QuantizedWeight:
    """Return a matrix with uniformly random codes, so that every bit matters; numbers of about one.

    has_every_float: 8-bit floats have uniformly random codes, too, but for NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    if name in OF_GGUF:
        kind = next(kind for kind in GGML_TYPES.values() if kind.name == name)
        blocks = torch.randint(0, 256, (num_outputs, num_inputs // kind.block, kind.num_bytes), generator=generator)
        blocks = blocks.to(torch.uint8)
        for at in HALVES_AT[name]:
            halves = (torch.rand(blocks.shape[:2], generator=generator) / 50).half()
            blocks[..., at : at + 2] = halves.unsqueeze(-1).view(torch.uint8)
        return GGMLWeight(blocks.flatten(1), kind)
    form = (GROUPED | MORE)[name]
    group_I = torch.arange(num_inputs) // (form.size or num_inputs)
    num_groups = int(group_I[-1]) + 1
    scales = torch.rand(num_outputs, num_groups, generator=generator) / 8 + 0.0625
    scales = scales.to(form.scales)
    of_order = torch.Generator().manual_seed(5)  # the same for any outputs
    if form.order == "unequal":  # as in one rank's columns
        group_I = torch.randint(0, num_groups, (num_inputs,), generator=of_order)
    elif form.order == "any":
        group_I = group_I[torch.randperm(num_inputs, generator=of_order)]
    factors = torch.rand(num_outputs, generator=generator) + 0.5 if form.has_factors else None
    if form.codes == torch.float8_e4m3fn:
        codes = torch.randn(num_outputs, num_inputs, generator=generator)
        if has_every_float:
            signs = torch.randint(0, 2, codes.shape, generator=generator)
            codes = torch.randint(0, 127, codes.shape, generator=generator) + 128 * signs
            return GroupedWeight(codes.to(torch.uint8).view(form.codes), scales, None, group_I)
        return GroupedWeight(codes.to(form.codes), scales, None, group_I)
    bits, least = 4 if form.codes is None else 8, -128 if form.codes == torch.int8 else 0
    codes = torch.randint(least, least + (1 << bits), (num_outputs, num_inputs), generator=generator)
    zeros = torch.randint(least, least + (1 << bits) + 1, scales.shape, generator=generator).float()
    if form.zeros is None:
        zeros.fill_(least + (1 << bits - 1))
    elif form.zeros == "broken":
        zeros += 0.25
    if form.codes is not None:
        return GroupedWeight(codes.to(form.codes), scales, None if not form.zeros and least else zeros, group_I)
    levels = None if form.levels is None else torch.tensor(form.levels)
    return GroupedWeight(
        pack_4_bits(codes), scales, zeros if levels is None else None, group_I, levels=levels, factors_O=factors
    )


def shape_of(name: str, num_outputs: int, num_inputs: int) -> tuple[int, int]:
    return num_outputs, num_inputs if not name.endswith("_K") else -(-num_inputs // 256) * 256
