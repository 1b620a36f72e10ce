"""State slots of one recurrent layer on one rank."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.recurrent.state_slots import LayerStates
from engine.kv.layout import DTYPES, KVLayout

# N slots, L inputs kept by the convolution, C channels, H heads, K key features, V value features


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

    def copy(self, source: int, target: int) -> None:
        """Copy one slot."""
        self.bytes_NB[target].copy_(self.bytes_NB[source])

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
