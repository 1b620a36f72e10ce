"""Random pool layers, and the test device of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.quant.row_quantization import INT4, SCALES, quantize_rows

# On a CPU kernels run in Triton's interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# The interpreter multiplies bf16 matrices as integers, and truncates fp32 to bf16 instead of rounding. So bf16
# arithmetic is tested on a GPU only; copies and scales, which are exact in bf16, are tested everywhere.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
QUANTIZED = EIGHT_BITS | {"int4": INT4}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def random_pool(
    num_blocks: int, num_heads: int, block_size: int, dim: int, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return codes (B, 2, K, S, D) with every place filled, and scales (B, 2, K, S) for a quantized dtype."""
    shape = (num_blocks, 2, num_heads, block_size, dim)
    if dtype in SCALES:
        return quantize_rows(random(*shape, seed=1) * 3, dtype)
    return random(*shape, dtype=dtype, seed=1), None


def random_slots(count: int, num_blocks: int, block_size: int) -> Tensor:
    """Return distinct slots in random order."""
    return torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(2))[:count].to(DEVICE)
