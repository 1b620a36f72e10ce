"""Wire format of a KV segment: packing from one pool and unpacking into another.

A segment is a run of layers and token positions of one sequence. Its payload, for L layers, T tokens and K heads of
each layer:

    codes   L x (T, 2, K, D)   fp8, int8 or int4 (D / 2 bytes), or the pool's dtype if the wire is raw; layers
                               with a window may have fewer tokens, see Segment
    scales  L x (T, 2, K)      bf16; int4 adds a bf16 zero to each scale; none for 16- and 32-bit codes
    rows    (N, F) bytes       draft-head features of the N positions that are the last of their block; sent with the
                               last layer, complete from every rank that sends heads of it

The payload of recurrent layers has views of each part of a state: see StatePool.views.

2 stands for keys, then values. A quantized pool ships its codes unchanged: nothing is quantized twice. Plain layers
(engine/kv/layout.py) ship the pool's dtype, without scales. With latent attention there is one side, K is 1, and a row
in 8 bits ends with its rotated key in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.types.errors import TransferError
from engine.batch.rows import Ints
from engine.cpu.library import open_copies
from engine.kernels.kv_wire import pack_kv, unpack_kv
from engine.kernels.quant.row_quantization import SCALES
from engine.kv.checksum import launch_word_sum
from engine.kv.layout import DTYPES, KVLayout
from engine.kv.pool import KVPool
from engine.runner import streams
from kvtransfer.protocol.frames import Segment
from kvtransfer.protocol.plan import head_counts


class _Row(NamedTuple):
    """A layer's row on the wire: one position and head of keys or of values."""

    dtype: torch.dtype
    # Elements of dtype.
    dim: int
    # None: without a scale.
    scale_dtype: torch.dtype | None
    code_bytes: int
    scale_bytes: int


class Codec:
    """Codec between two pools of one layout.

    Sends the pools' bytes unchanged, or quantizes bf16, fp16 and fp32 pools to 8 or 4 bits plus scales. `heads` are the
    heads to copy of each layer of the model, as indices within this rank's own; see HeadCopy.
    """

    def __init__(self, layout: KVLayout, dtype: torch.dtype) -> None:
        """dtype: codes on the wire."""
        self._layout = layout
        self._rows = [
            _row(layout, layer, layout.dtype_of(layer) if layer in layout.plain_layers else dtype)
            for layer in range(layout.num_layers)
        ]

    def num_bytes(self, segment: Segment, heads: Sequence[range]) -> int:
        """Return the size of the segment's payload in bytes."""
        if self.is_of_states(segment):
            first = self._layout.num_layers
            return sum(self._layout.unit_bytes(i - first) * len(heads[i]) for i in segment.layers)
        rows = self._rows
        row_bytes = sum(
            self._num_tokens(segment, i) * len(heads[i]) * (rows[i].code_bytes + rows[i].scale_bytes)
            for i in segment.layers
        )
        return self._layout.num_sides * row_bytes + self._num_feature_bytes(segment)

    def max_row_bytes(self) -> int:
        """Return the maximum bytes that one position of one layer has on the wire, with all heads of a rank."""
        each = zip(self._layout.heads, self._rows, strict=True)
        return self._layout.num_sides * max(heads.num_heads * (row.code_bytes + row.scale_bytes) for heads, row in each)

    def is_of_states(self, segment: Segment) -> bool:
        """Return True for a segment of recurrent layers. No segment has both kinds of layers."""
        return segment.first_layer >= self._layout.num_layers

    def pack_states(self, pool: KVPool, segment: Segment, units: Sequence[range], slot: int, payload: Tensor) -> None:
        """Fill `payload` with the states in a slot, an index in the pool. units: of each layer, as in HeadCopy."""
        for part_bytes, part in self._state_parts(pool, segment, units, slot, payload):
            part_bytes.copy_(part.contiguous().view(torch.uint8).flatten())

    def unpack_states(self, payload: Tensor, pool: KVPool, segment: Segment, units: Sequence[range], slot: int) -> None:
        """Write the states in `payload` to a slot of the pool."""
        for part_bytes, part in self._state_parts(pool, segment, units, slot, payload):
            part.copy_(part_bytes.clone().view(part.dtype).view(part.shape))

    def pack(
        self,
        pool: KVPool,
        segment: Segment,
        heads: Sequence[range],
        slots_T: Tensor,
        payload: Tensor,
        *,
        window_slots_T: Tensor | None = None,
    ) -> None:
        """Fill `payload` (uint8, num_bytes) with the KV at `slots_T` (int64, one per token of the segment).

        window_slots_T: slots of the segment's positions in layers with a window; see window_slots_of.
        """
        for layer, chosen, codes_T2KD, scales_T2K in self._views(payload, segment, heads):
            codes, scales = pool.layer(layer)
            of_layer_T = self._slots_in(layer, slots_T, window_slots_T)
            pack_kv(codes, of_layer_T, chosen, codes_T2KD, scales_T2K if scales is None else None)
            if scales is not None and scales_T2K is not None:
                pack_kv(scales.unsqueeze(-1), of_layer_T, chosen, scales_T2K.unsqueeze(-1), None)
        if num_bytes := self._num_feature_bytes(segment):
            features_NF = pool.features.index_select(0, self._full_blocks(segment, slots_T))
            payload[-num_bytes:].copy_(features_NF.flatten())

    def unpack(
        self,
        payload: Tensor,
        pool: KVPool,
        segment: Segment,
        heads: Sequence[range],
        slots_T: Tensor,
        *,
        window_slots_T: Tensor | None = None,
    ) -> None:
        """Write the payload's KV at `slots_T` of the pool. window_slots_T: see `pack`."""
        for layer, chosen, codes_T2KD, scales_T2K in self._views(payload, segment, heads):
            codes, scales = pool.layer(layer)
            of_layer_T = self._slots_in(layer, slots_T, window_slots_T)
            unpack_kv(codes_T2KD, scales_T2K if scales is None else None, codes, of_layer_T, chosen)
            if scales is not None and scales_T2K is not None:
                unpack_kv(scales_T2K.unsqueeze(-1), None, scales.unsqueeze(-1), of_layer_T, chosen)
        if num_bytes := self._num_feature_bytes(segment):
            features_NF = payload[-num_bytes:].view(-1, self._layout.feature_bytes)
            pool.features.index_copy_(0, self._full_blocks(segment, slots_T), features_NF)

    def warm_up(self, device: torch.device) -> None:
        """Compile the GPU kernels for all heads that a peer's tensor-parallel degree can require.

        Uses a temporary pool, so that no handoff waits for compilation. Does nothing on a CPU.
        """
        if device.type != "cuda":
            return
        layout, pool = self._layout, KVPool(self._layout, num_blocks=1, device=device)
        own = tuple(heads.num_heads for heads in layout.heads)
        # One token covers the variant whose scales are not aligned to 16 bytes.
        for num_tokens, counts in [(layout.block_size, own), *((1, counts) for counts in head_counts(layout))]:
            segment = Segment(first_layer=0, num_layers=layout.num_layers, first_token=0, num_tokens=num_tokens)
            heads, slots_T = [range(count) for count in counts], slots_of(pool, [0], 0, num_tokens)
            payload = torch.empty(self.num_bytes(segment, heads), dtype=torch.uint8, device=device)
            self.pack(pool, segment, heads, slots_T, payload, window_slots_T=slots_T)
            launch_word_sum(payload)
            self.unpack(payload, pool, segment, heads, slots_T, window_slots_T=slots_T)

    def _num_tokens(self, segment: Segment, layer: int) -> int:
        return segment.num_window_tokens if self._layout.is_windowed(layer) else segment.num_tokens

    def _slots_in(self, layer: int, slots_T: Tensor, window_slots_T: Tensor | None) -> Tensor:
        if not self._layout.is_windowed(layer):
            return slots_T
        assert window_slots_T is not None, "the slots in layers with a window are missing"
        return window_slots_T

    def _num_feature_bytes(self, segment: Segment) -> int:
        layout = self._layout
        if not layout.feature_bytes or segment.layers.stop != layout.num_layers:
            return 0
        return (
            segment.end_token // layout.block_size - segment.first_token // layout.block_size
        ) * layout.feature_bytes

    def _state_parts(
        self, pool: KVPool, segment: Segment, units: Sequence[range], slot: int, payload: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of each view of a state in the payload, and the view in the pool."""
        start = 0
        for index in segment.layers:
            layer, part = self._layout.state_parts[index - self._layout.num_layers]
            for view in pool.states[layer].views(slot, part, units[index]):
                num_bytes = view.numel() * view.itemsize
                yield payload[start : start + num_bytes], view
                start += num_bytes

    def _full_blocks(self, segment: Segment, slots_T: Tensor) -> Tensor:
        """Return the (N,) int64 ids of blocks whose last position is in the segment."""
        size = self._layout.block_size
        return slots_T[size - 1 - segment.first_token % size :: size] // size

    def _views(
        self, payload: Tensor, segment: Segment, heads: Sequence[range]
    ) -> Iterator[tuple[int, slice, Tensor, Tensor | None]]:
        """Yield each layer that has heads, its heads, and views of their codes (T, 2, K, D) and scales (T, 2, K).

        The last is None if the codes have no scales.
        """
        layers = [layer for layer in segment.layers if heads[layer] and self._num_tokens(segment, layer)]
        rows = [self._rows[layer] for layer in layers]
        num_sides = self._layout.num_sides
        counts = [self._num_tokens(segment, layer) * num_sides * len(heads[layer]) for layer in layers]
        sizes = [count * row.code_bytes for count, row in zip(counts, rows, strict=True)]
        sizes += [count * row.scale_bytes for count, row in zip(counts, rows, strict=True)]
        parts = torch.split(payload[: sum(sizes)], sizes)
        codes, scales = parts[: len(layers)], parts[len(layers) :]
        for layer, row, of_layer, of_rows in zip(layers, rows, codes, scales, strict=True):
            chosen, shape = heads[layer], (self._num_tokens(segment, layer), num_sides, len(heads[layer]))
            scales_T2K = of_rows.view(row.scale_dtype).view(shape) if row.scale_dtype else None
            yield layer, slice(chosen.start, chosen.stop), of_layer.view(row.dtype).view(*shape, row.dim), scales_T2K


def _row(layout: KVLayout, layer: int, dtype: torch.dtype) -> _Row:
    scale_dtype, dim = SCALES.get(dtype), layout.row_dim_of(layer, dtype)
    return _Row(dtype, dim, scale_dtype, dim * dtype.itemsize, scale_dtype.itemsize if scale_dtype else 0)


def codec_for(layout: KVLayout, wire_dtype: str) -> Codec:
    """Return the codec for pools of `layout` and `wire_dtype` (a quantized one, or "raw").

    Takes seconds if the CPU kernels are not compiled yet, so call it before a link's thread needs them.
    """
    open_copies(torch.device("cpu"))
    is_raw = wire_dtype == "raw" or layout.has_scales
    return Codec(layout, layout.torch_dtype if is_raw else DTYPES[wire_dtype])


def slots_of(pool: KVPool, blocks: Sequence[int], first_token: int, num_tokens: int) -> Tensor:
    """Return the pool slots of positions [first_token, first_token + num_tokens) of a block table.

    Returns (num_tokens,) int64, uploaded on the calling thread's current stream. This is the bounds check for `pack`
    and `unpack`, whose kernels do not check slots. Raises TransferError if the table is too short or has blocks outside
    the pool.
    """
    return streams.upload_indices(_slots(pool, blocks, first_token, num_tokens), pool.device)


def window_slots_of(pool: KVPool, blocks: Sequence[int], first_token: int, num_tokens: int) -> Tensor | None:
    """Return the slots in layers with a window, with the checks of `slots_of`; None if no layer frees blocks.

    Blocks without a part have part 0.
    """
    if pool.window_of is None:
        return None
    return streams.upload_indices(pool.window_slots(_slots(pool, blocks, first_token, num_tokens)), pool.device)


def _slots(pool: KVPool, blocks: Sequence[int], first_token: int, num_tokens: int) -> Ints:
    size = pool.layout.block_size
    first_block, end_block = first_token // size, -(-(first_token + num_tokens) // size)
    blocks_B = np.array(blocks[first_block:end_block], dtype=np.int64)
    if len(blocks_B) < end_block - first_block or (blocks_B.view(np.uint64) >= pool.num_blocks).any():  # or negative
        end_token = first_token + num_tokens
        raise TransferError(f"positions [{first_token}, {end_token}) are outside the pool of {pool.num_blocks} blocks")
    slots_BS = blocks_B[:, None] * size + np.arange(size)
    offset = first_token - first_block * size
    slots_T: Ints = slots_BS.ravel()[offset : offset + num_tokens]
    return slots_T
