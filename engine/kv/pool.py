"""KV tensors of one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch.rows import Ints
from engine.kernels.attention.kv_write import write_kv, write_rows
from engine.kernels.quant.row_quantization import SCALES, as_bytes, dequantize_rows
from engine.kv.layout import KVLayout
from engine.runner import streams

# T tokens, R rows (sequences), B blocks, L = B * S positions, S block_size; of a layer: K kv heads of this rank,
# D head_dim; 2: keys, then values, or the single side of a latent layout


class KVPool:
    """KV blocks of one rank, all layers. BlockManager assigns them to sequences.

    `codes[layer]` is (B, 2, K, S, row_dim); `scales[layer]` is (B, 2, K, S), empty for a plain layer; `scales` is empty
    if nothing is quantized. See KVLayout. Layers of draft heads have spare blocks after these B.
    A slot is block id * S + offset. `features` is (B, feature_bytes) uint8.
    """

    def __init__(self, layout: KVLayout, *, num_blocks: int, device: torch.device, num_spare: int = 0) -> None:
        """num_spare: extra blocks of the draft layers, after all others, for KV of speculated tokens.

        Spare blocks belong to no sequence and are never transferred.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        shapes = [(layout.num_sides, heads.num_heads, layout.block_size) for heads in layout.heads]
        counts = [num_blocks + num_spare * (layer in layout.draft_layers) for layer in range(layout.num_layers)]
        dtypes = [layout.dtype_of(layer) for layer in range(layout.num_layers)]
        self.codes = [
            _zeros((count, *shape, layout.row_dim_of(layer, dtype)), dtype, device)
            for layer, (count, shape, dtype) in enumerate(zip(counts, shapes, dtypes, strict=True))
        ]
        self.scales: list[Tensor] = []
        if layout.has_scales:
            for count, shape, dtype in zip(counts, shapes, dtypes, strict=True):
                if dtype in SCALES:
                    self.scales.append(_zeros((count, *shape), SCALES[dtype], device))
                else:
                    self.scales.append(torch.empty(count, 0, device=device))
        self.features = _zeros((num_blocks, layout.feature_bytes), torch.uint8, device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return the codes of a layer, and its scales if the pool has any."""
        has_scales = self.codes[layer].dtype in SCALES
        return self.codes[layer], self.scales[layer] if has_scales else None

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store keys and values at `slots_T`; quantizes if the pool has scales. See write_kv."""
        write_kv(*self.layer(layer), slots_T, k_TKD, v_TKD)

    def write_latents(self, layer: int, slots_T: Tensor, rows_TD: Tensor) -> None:
        """Store one row per token of a latent layout."""
        write_rows(*self.layer(layer), slots_T, rows_TD[:, None, None])

    def read(self, layer: int, block_ids_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather blocks as `dtype`: (2, K, B * S, D), in the order of block_ids_B."""
        codes, scales = self.layer(layer)
        kv_B2KSD = as_bytes(codes)[block_ids_B].view(codes.dtype)
        if scales is not None:
            kv_B2KSD = dequantize_rows(kv_B2KSD, scales[block_ids_B], dtype, exact=self.layout.exact_dim)
        return kv_B2KSD.to(dtype).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def synchronize(self) -> None:
        """Block the host until the device work that the calling thread started is done."""
        streams.streams_of(self.device).synchronize()

    def runs(self, layer: int, tables_RB: Ints) -> Tensor:
        """Return the runs of R equally long block tables for `gather`, (2, R, K, B) int64.

        Valid for every layer with as many heads.
        """
        num_heads = self.layout.heads[layer].num_heads
        num_sides = self.layout.num_sides
        side_2111 = np.arange(num_sides).reshape(num_sides, 1, 1, 1)
        head_K1 = np.arange(num_heads).reshape(num_heads, 1)
        runs_2RKB = (tables_RB[:, None, :] * num_sides + side_2111) * num_heads + head_K1
        return torch.from_numpy(runs_2RKB).to(self.device)

    def gather(self, layer: int, runs_2RKB: Tensor, dtype: torch.dtype) -> Tensor:
        """Return keys and values of whole blocks as `dtype`, (2, R, K, B * S, D)."""
        codes, scales = self.layer(layer)
        block_size, row_dim = codes.shape[3:]
        shape_2RKLD = (*runs_2RKB.shape[:-1], runs_2RKB.shape[-1] * block_size, row_dim)
        flat_N = runs_2RKB.flatten()
        chosen = as_bytes(codes).view(-1, block_size * row_dim).index_select(0, flat_N).view(shape_2RKLD)
        if scales is None:
            return chosen.to(dtype)
        scales = scales.view(-1, block_size).index_select(0, flat_N).view(shape_2RKLD[:-1])
        return dequantize_rows(chosen.view(codes.dtype), scales, dtype, exact=self.layout.exact_dim)

    def copy_out(self, blocks: Sequence[int], *, into: Tensor | None = None) -> Tensor:
        """Copy whole blocks to (B, block_bytes) uint8 on the pool's device.

        Order: codes of each layer, scales of each layer, features. into: target tensor; None allocates one.
        """
        index_B, parts = streams.upload_indices(blocks, self.device), self._parts()
        chosen = [part_BN.index_select(0, index_B) for part_BN in parts]
        payloads = torch.cat(chosen, dim=1, out=None if into is None else into.view(parts[0].dtype))
        return payloads.view(torch.uint8)

    def copy_in(self, payloads_BN: Tensor, blocks: Sequence[int]) -> None:
        """Fill blocks with payloads made by `copy_out`, on any device."""
        index_B, parts = streams.upload_indices(blocks, self.device), self._parts()
        payloads = torch.split(payloads_BN.view(parts[0].dtype), [part_BN.shape[1] for part_BN in parts], dim=1)
        for part_BN, payload in zip(parts, payloads, strict=True):
            part_BN.index_copy_(0, index_B, payload.to(self.device))

    def _parts(self) -> list[Tensor]:
        """Return codes and scales of every layer, and features, each (num_blocks, N) or longer.

        Viewed as int64 where sizes permit, because torch copies bytes one by one.
        """
        parts = [part.view(torch.uint8).flatten(1) for part in (*self.codes, *self.scales) if part.numel()]
        parts += [self.features] if self.layout.feature_bytes else []
        is_even = all(part.shape[1] % 8 == 0 for part in parts)
        return [part.view(torch.int64) for part in parts] if is_even else parts

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers, for a sequence that forks inside a block."""
        for codes in self.codes:
            codes[target].copy_(codes[source])
        for scales in self.scales:
            scales[target].copy_(scales[source])
        self.features[target].copy_(self.features[source])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if device.type != "cpu" else lazy_zeros(shape, dtype)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate zeroed host memory that is mapped on first touch, or by engine.cpu.huge_pages.populate.

    Only the used part occupies memory; torch.zeros touches all of it at once.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
