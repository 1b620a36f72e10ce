"""Random matrices in every low-bit format of the CPU kernels."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType

from core.model.gguf_table import GGML_TYPES
from engine.weights.quantized_weight import GGMLWeight, GroupedWeight, QuantizedWeight
from tests.engine.gguf_files import random_blocks

OF_GGUF = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
OF_GROUPS = [32, 64, 128]
FORMATS: list[str | int] = [*OF_GGUF, *OF_GROUPS]


def random_weight(name: str | int, num_outputs: int, num_inputs: int) -> QuantizedWeight:
    """Return a matrix with uniformly random codes, so that every bit matters."""
    if isinstance(name, str):
        kind = next(kind for kind in GGML_TYPES.values() if kind.name == name)
        blocks = random_blocks(GGMLQuantizationType[name], num_outputs * num_inputs // kind.block)
        return GGMLWeight(torch.from_numpy(blocks).view(num_outputs, -1), kind)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (num_outputs, num_inputs), generator=generator)
    zeros = torch.randint(0, 17, (num_outputs, num_inputs // name), generator=generator).float()
    scales = torch.randn(num_outputs, num_inputs // name, generator=generator).half().float()
    return GroupedWeight.of_4_bits(codes, scales, zeros, torch.arange(num_inputs) // name)
