"""KV tensors of one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from core.types.errors import TransferError
from engine.batch.rows import Ints, slots_in_windows
from engine.kernels.attention.kv_write import write_kv, write_rows
from engine.kernels.quant.row_quantization import SCALES, as_bytes, dequantize_rows
from engine.kernels.recurrent.state_slots import LayerStates
from engine.kv.layout import DTYPES, KVLayout
from engine.kv.window_manager import WindowManager
from engine.runner import streams

# T tokens, R rows (sequences), B blocks, L = B * S positions, S block_size; of a layer: K kv heads of this rank,
# D head_dim; 2: keys, then values, or the single side of a latent layout; of states: N slots, L inputs kept by the
# convolution, C channels, H heads, K key features, V value features


class KVPool:
    """KV blocks of one rank, all layers. BlockManager assigns them to sequences.

    `codes[layer]` is (B, 2, K, S, row_dim); `scales[layer]` is (B, 2, K, S), empty for a plain layer; `scales` is empty
    if nothing is quantized. See KVLayout. Layers of draft heads have spare blocks after these B.
    A slot is block id * S + offset. `features` is (B, feature_bytes) uint8. `states` has the
    state slots of each recurrent layer; they are unrelated to the slots of tokens.

    Layers with a window have `num_window_parts` blocks, called parts, in place of B. `window_of` maps a block id to its
    part, and is changed by `attach` before each step. A block without a part is mapped to part 0, which stays zero if
    `num_window_parts` is given. Methods that take a layer with block ids or slots expect the layer's own ids and slots;
    see `window_slots`.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_blocks: int,
        device: torch.device,
        num_spare: int = 0,
        num_states: int = 1,
        num_window_parts: int | None = None,
    ) -> None:
        """num_spare: extra blocks of the draft layers, after all others, for KV of speculated tokens.

        Spare blocks belong to no sequence and are never transferred. num_states: state slots. num_window_parts: None:
        one part per block.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_window_parts = num_blocks if num_window_parts is None else num_window_parts
        self._has_empty_part = num_window_parts is not None
        # (B,) int64 on the host; None: no layer has parts.
        self.window_of: Ints | None = None
        if layout.windows:
            has_own = not self._has_empty_part
            self.window_of = np.arange(num_blocks) if has_own else np.zeros(num_blocks, dtype=np.int64)
        self.num_states = num_states if layout.recurrent_layers else 0
        self.device = device
        shapes = [(layout.num_sides, heads.num_heads, layout.block_size) for heads in layout.heads]
        counts = [
            self.num_window_parts
            if layout.is_windowed(layer)
            else num_blocks + num_spare * (layer in layout.draft_layers)
            for layer in range(layout.num_layers)
        ]
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
        self.states = [StatePool(layout, layer, num_states, device) for layer in range(len(layout.recurrent_layers))]
        self.features = _zeros((num_blocks, layout.feature_bytes), torch.uint8, device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return the codes of a layer, and its scales if the pool has any."""
        has_scales = self.codes[layer].dtype in SCALES
        return self.codes[layer], self.scales[layer] if has_scales else None

    def attach(self, parts: Sequence[tuple[int, int]]) -> None:
        """Change the parts of blocks: pairs of block id and part, 0 for none."""
        if parts:
            assert self.window_of is not None, "no layer of the pool has a window"
            blocks, numbers = np.array(parts, dtype=np.int64).T
            self.window_of[blocks] = numbers

    @contextmanager
    def with_parts(self) -> Iterator[None]:
        """Map every block to a part, shared by several blocks, for steps whose results are discarded."""
        if self.window_of is None or not self._has_empty_part:
            yield
            return
        parts = 1 + np.arange(self.num_blocks) % (self.num_window_parts - 1)
        self.attach(list(enumerate(parts.tolist())))
        yield
        self.window_of[:] = 0

    def check_parts(self, blocks: Sequence[int]) -> None:
        """Raise TransferError if one of these blocks has no part to write to."""
        if self.window_of is not None and self._has_empty_part and blocks:
            if not self.window_of[np.array(blocks)].all():
                raise TransferError("a block to receive has no part in layers with a window")

    def window_slots(self, slots_T: Ints) -> Ints:
        """Map slots of positions to their slots in layers with a window."""
        assert self.window_of is not None, "no layer of the pool has a window"
        return slots_in_windows(slots_T, self.window_of, self.layout.block_size)

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
            kv_B2KSD = dequantize_rows(kv_B2KSD, scales[block_ids_B], dtype, exact=self.layout.exact_dims[layer])
        return kv_B2KSD.to(dtype).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def read_tails(self, layer: int, block_ids_RB: Tensor, num: int) -> Tensor:
        """Gather the last `num` numbers of the rows of latent blocks, which no pool quantizes: (R, B * S, num).

        bf16 if the pool is quantized.
        """
        codes, scales = self.layer(layer)
        tails_BSN = as_bytes(codes)[:, 0, 0, :, -num * (1 if scales is None else 2) :]
        tails_RLN = tails_BSN[block_ids_RB].flatten(1, 2)
        return tails_RLN if scales is None else tails_RLN.view(torch.uint8).view(torch.bfloat16)

    def read_slots(self, layer: int, slots_N: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gather the latent rows at `slots_N` in the pool's dtype: codes (N, row_dim), and scales (N) if it has any."""
        codes, scales = self.layer(layer)
        rows_ND = as_bytes(codes).view(-1, codes.shape[-1]).index_select(0, slots_N).view(codes.dtype)
        return rows_ND, None if scales is None else scales.view(-1).index_select(0, slots_N)

    def synchronize(self) -> None:
        """Block the host until the device work that the calling thread started is done."""
        streams.streams_of(self.device).synchronize()

    def runs(self, layer: int, tables_RB: Ints) -> Tensor:
        """Return the runs of R equally long block tables for `gather`, (2, R, K, B) int64.

        Valid for every layer with the same number of heads.
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
        return dequantize_rows(chosen.view(codes.dtype), scales, dtype, exact=self.layout.exact_dims[layer])

    def copy_out(self, blocks: Sequence[int], *, into: Tensor | None = None) -> Tensor:
        """Copy blocks, without their parts, to (B, place_bytes) uint8 on the pool's device.

        Order: codes of each layer, scales of each layer, features. Ids from num_blocks on are pieces of state slots, or
        of parts: num_blocks + index of the slot or part * layout.num_pieces + piece. into: target tensor; None
        allocates one.
        """
        if max(blocks, default=0) < self.num_blocks:
            return self._gather(blocks, windowed=False, into=into)
        into = into if into is not None else self._empty_rows(len(blocks))
        for rows, ids in _kinds(blocks, self.num_blocks):
            payloads_BN = self.copy_out(ids) if ids[0] < self.num_blocks else self._pieces(ids)
            into.index_copy_(0, streams.upload_indices(rows, self.device), payloads_BN)
        return into

    def copy_in(self, payloads_BN: Tensor, blocks: Sequence[int]) -> None:
        """Fill blocks, or pieces of state slots or parts, with payloads made by `copy_out`, on any device."""
        if max(blocks, default=0) < self.num_blocks:
            self._scatter(payloads_BN, blocks, windowed=False)
            return
        for rows, ids in _kinds(blocks, self.num_blocks):
            chosen_BN = payloads_BN.index_select(0, streams.upload_indices(rows, payloads_BN.device))
            if ids[0] < self.num_blocks:
                self.copy_in(chosen_BN, ids)
            elif self.states:
                for payload_N, number in zip(chosen_BN, ids, strict=True):
                    start = 0
                    for run in self._state_piece(number):
                        run.copy_(payload_N[start : start + len(run)])
                        start += len(run)
            else:
                parts, places = self._part_pieces(ids)
                pieces_PN = self._padded_parts(parts)
                pieces_PN.index_copy_(0, streams.upload_indices(places, self.device), chosen_BN.to(self.device))
                whole_PN = pieces_PN.view(len(parts), -1)[:, : self.layout.window_part_bytes]
                self._scatter(whole_PN.contiguous(), parts, windowed=True)

    def _gather(self, ids: Sequence[int], *, windowed: bool, into: Tensor | None = None) -> Tensor:
        """Copy the blocks of layers without a window and their features; if `windowed`, parts of layers with one."""
        index_B, tensors = streams.upload_indices(ids, self.device), self._tensors(windowed=windowed)
        chosen = [tensor_BN.index_select(0, index_B) for tensor_BN in tensors]
        payloads = torch.cat(chosen, dim=1, out=None if into is None else into.view(tensors[0].dtype))
        return payloads.view(torch.uint8)

    def _scatter(self, payloads_BN: Tensor, ids: Sequence[int], *, windowed: bool) -> None:
        index_B, tensors = streams.upload_indices(ids, self.device), self._tensors(windowed=windowed)
        payloads = torch.split(payloads_BN.view(tensors[0].dtype), [tensor_BN.shape[1] for tensor_BN in tensors], dim=1)
        for tensor_BN, payload in zip(tensors, payloads, strict=True):
            tensor_BN.index_copy_(0, index_B, payload.to(self.device))

    def _pieces(self, numbers: Sequence[int]) -> Tensor:
        """Return pieces of state slots or parts, (B, place_bytes) uint8. numbers: as in `copy_out`."""
        if not self.states:
            parts, places = self._part_pieces(numbers)
            return self._padded_parts(parts).index_select(0, streams.upload_indices(places, self.device))
        rows_BN = self._empty_rows(len(numbers))
        for row_N, number in zip(rows_BN, numbers, strict=True):
            payload_N = torch.cat(self._state_piece(number))
            row_N[: len(payload_N)].copy_(payload_N)
        return rows_BN

    def _state_piece(self, number: int) -> list[Tensor]:
        """Return a piece of a state slot as views of its bytes in each layer. number: as in `copy_out`."""
        slot, piece = divmod(number - self.num_blocks, self.layout.num_pieces)
        start, runs = piece * self.layout.place_bytes, list[Tensor]()
        end = start + self.layout.place_bytes
        for layer in self.states:
            size = layer.bytes_NB.shape[1]
            if start < size and end > 0:
                runs.append(layer.bytes_NB[slot, max(0, start) : end])
            start, end = start - size, end - size
        return runs

    def _part_pieces(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the parts of these pieces, and each piece's row in the result of `_padded_parts`."""
        num_pieces = self.layout.num_pieces
        pairs = [divmod(number - self.num_blocks, num_pieces) for number in numbers]
        rows = {part: row for row, part in enumerate(dict.fromkeys(part for part, _ in pairs))}
        return list(rows), [rows[part] * num_pieces + piece for part, piece in pairs]

    def _padded_parts(self, parts: Sequence[int]) -> Tensor:
        """Copy all pieces of parts, (P * num_pieces, place_bytes) uint8. The last piece of each ends with zeros."""
        padded_bytes, part_bytes = self.layout.num_pieces * self.layout.place_bytes, self.layout.window_part_bytes
        padding_PN = torch.zeros((len(parts), padded_bytes - part_bytes), dtype=torch.uint8, device=self.device)
        whole_PN = torch.cat([self._gather(parts, windowed=True), padding_PN], dim=1)
        return whole_PN.view(-1, self.layout.place_bytes)

    def _empty_rows(self, count: int) -> Tensor:
        return torch.zeros((count, self.layout.place_bytes), dtype=torch.uint8, device=self.device)

    def _tensors(self, *, windowed: bool) -> list[Tensor]:
        """Return codes and scales of the layers with a window, or of those without plus the features.

        Each is (number of blocks or parts, N), or longer. Viewed as int64 where sizes permit, because torch copies
        bytes one by one.
        """
        layers = [layer for layer in range(self.layout.num_layers) if self.layout.is_windowed(layer) == windowed]
        every = [kind[layer] for kind in (self.codes, self.scales) if kind for layer in layers]
        tensors = [tensor.view(torch.uint8).flatten(1) for tensor in every if tensor.numel()]
        tensors += [self.features] if self.layout.feature_bytes and not windowed else []
        is_even = all(tensor.shape[1] % 8 == 0 for tensor in tensors)
        return [tensor.view(torch.int64) for tensor in tensors] if is_even else tensors

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers, for a sequence that forks inside a block."""
        pair = source, target
        in_windows = pair if self.window_of is None else (int(self.window_of[source]), int(self.window_of[target]))
        for layer, codes in enumerate(self.codes):
            of_layer, to_layer = in_windows if self.layout.is_windowed(layer) else pair
            codes[to_layer].copy_(codes[of_layer])
            if self.scales and self.scales[layer].numel():
                self.scales[layer][to_layer].copy_(self.scales[layer][of_layer])
        self.features[target].copy_(self.features[source])

    def state_index(self, slot: int | None) -> int:
        """Return the index in the pool of a state slot; see StateManager. Raises TransferError if it is outside."""
        index = -1 if slot is None else slot - self.num_blocks
        if not 0 <= index < self.num_states:
            raise TransferError(f"state slot {slot} is outside the pool of {self.num_states} slots")
        return index

    def copy_state(self, source: int, target: int) -> None:
        """Copy one state slot in all layers."""
        for layer in self.states:
            layer.bytes_NB[target].copy_(layer.bytes_NB[source])


class StatePool:
    """State slots of one layer, assigned by StateManager. A slot is contiguous: matrices, then convolution inputs.

    `tensors` are views of all slots, `bytes_NB` their bytes, (N, B) uint8.
    """

    def __init__(self, layout: KVLayout, layer: int, num_slots: int, device: torch.device) -> None:
        """layer: index in `layout.recurrent_layers`."""
        shape, size, dtype = layout.recurrent_layers[layer], layout.tensor_parallel, DTYPES[layout.state_dtype]
        end = layout.state_bytes_of(layer)
        self.bytes_NB = torch.zeros(num_slots, layout.slot_bytes_of(layer), dtype=torch.uint8, device=device)
        matrices, conv = shape.matrix_shape(size), shape.conv_shape(size)
        num_bytes = shape.matrix_bytes(size)
        matrix_NHKV = torch.unflatten(self.bytes_NB[:, :num_bytes].view(torch.float32), 1, matrices)
        conv_NLC = torch.unflatten(self.bytes_NB[:, num_bytes:end].view(dtype), 1, conv)
        self.tensors = LayerStates(conv_NLC, matrix_NHKV)
        # Of each part: this rank's units, and their channels by section.
        self._parts = [(max(1, num_units // size), unit_channels) for num_units, unit_channels in shape.parts]

    def views(self, slot: int, part: int, units: range) -> list[Tensor]:
        """Return views of some units of a slot's state: of the matrices, then of each section of channels.

        part: index in RecurrentShape.parts. units: indices within this rank's own.
        """
        conv_NLC, matrix_NHKV = self.tensors
        num_units, unit_channels = self._parts[part]
        views = []
        if part == 0:
            heads = matrix_NHKV.shape[1] // num_units
            views.append(matrix_NHKV[slot, units.start * heads : units.stop * heads])
        base = sum(count * sum(widths) for count, widths in self._parts[:part])
        for width in unit_channels:
            views.append(conv_NLC[slot, :, base + units.start * width : base + units.stop * width])
            base += num_units * width
        return views


def window_manager_of(pool: KVPool, *, max_batch_tokens: int) -> WindowManager | None:
    """Return the manager of a pool's parts; None if its layers keep every block. max_batch_tokens: limit of a step."""
    layout = pool.layout
    if not layout.windows:
        return None
    return WindowManager(
        pool.num_window_parts,
        num_blocks=pool.num_blocks,
        window=layout.window,
        block_size=layout.block_size,
        max_batch_tokens=max_batch_tokens,
    )


def _kinds(ids: Sequence[int], num_blocks: int) -> list[tuple[list[int], list[int]]]:
    """Split ids into those below `num_blocks` and the others: positions in the list, and ids."""
    groups = ([i for i, one in enumerate(ids) if (one < num_blocks) == is_block] for is_block in (True, False))
    return [(group, [ids[i] for i in group]) for group in groups if group]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if device.type != "cpu" else lazy_zeros(shape, dtype)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate zeroed host memory that is mapped on first touch, or by engine.cpu.huge_pages.populate.

    Only the used part occupies memory; torch.zeros touches all of it at once.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
