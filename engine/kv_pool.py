"""One rank's KV tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.fp8 import dequantize_fp8, quantize_fp8
from engine.kv_layout import KVLayout

# T tokens, B blocks, K kv heads of this rank, S block_size, D head_dim


class KVPool:
    """The blocks of one rank, for every layer. It knows nothing of who uses which block: see BlockManager.

    `codes[layer]` is (B, 2, K, S, D); `scales[layer]` is (B, 2, K, S) bf16 for an fp8 pool, else `scales` is empty.
    A slot is block id * S + offset.
    """

    def __init__(self, layout: KVLayout, *, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        shape = (num_blocks, 2, layout.heads_per_rank, layout.block_size, layout.head_dim)
        # Zeroed memory is mapped on first touch: a pool costs what its used blocks cost.
        self.codes = [torch.zeros(shape, dtype=layout.torch_dtype, device=device) for _ in range(layout.num_layers)]
        self.scales = (
            [torch.zeros(shape[:-1], dtype=torch.bfloat16, device=device) for _ in range(layout.num_layers)]
            if layout.has_scales
            else []
        )

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store keys and values at `slots_T` (int64), quantising if the pool is fp8."""
        kv_T2KD = torch.stack((k_TKD, v_TKD), dim=1)
        block_T, offset_T = slots_T // self.layout.block_size, slots_T % self.layout.block_size
        if self.scales:
            kv_T2KD, scales_T2K = quantize_fp8(kv_T2KD)
            self.scales[layer][block_T, :, :, offset_T] = scales_T2K
        _bytes(self.codes[layer])[block_T, :, :, offset_T] = _bytes(kv_T2KD.to(self.layout.torch_dtype))

    def read(self, layer: int, block_ids_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather blocks as `dtype`: (2, K, B * S, D), in the order of block_ids_B."""
        codes_B2KSD = self.codes[layer][block_ids_B] if not self.scales else _gather_fp8(self.codes[layer], block_ids_B)
        if self.scales:
            codes_B2KSD = dequantize_fp8(codes_B2KSD, self.scales[layer][block_ids_B], dtype)
        return codes_B2KSD.to(dtype).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block, all layers: for a sequence that forks inside a block."""
        for codes in self.codes:
            codes[target].copy_(codes[source])
        for scales in self.scales:
            scales[target].copy_(scales[source])


def _bytes(x: Tensor) -> Tensor:
    """fp8 tensors as bytes, since torch indexes few operations on float8; others as they are."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _gather_fp8(codes: Tensor, block_ids_B: Tensor) -> Tensor:
    return _bytes(codes)[block_ids_B].view(torch.float8_e4m3fn)
