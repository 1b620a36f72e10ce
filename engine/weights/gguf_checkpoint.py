"""Weights in GGUF files that were imported as a tensor table."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core.model.gguf_table import GGML_TYPES, read_table
from core.types.errors import SpecError
from engine.weights.checkpoint import Span
from engine.weights.quantized_weight import GGMLWeight


class GGUFCheckpoint:
    """Implements Checkpoint over memory-mapped GGUF files."""

    unindexed = ()

    def __init__(self, model_dir: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in read_table(model_dir)}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._data = {file: _map(Path(file)) for file in sorted({t.file for t in self._tensors.values()})}

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        tensor, blocks = self._tensors[name], self._blocks(name, rows)
        values = blocks.rows(0, len(blocks.blocks_OB)).view(-1, *tensor.shape[1:])
        return values if columns is None else values[:, slice(*columns)]

    def is_quantized(self, name: str) -> bool:
        return GGML_TYPES[self._tensors[name].ggml_type].block > 1

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> GGMLWeight | None:
        kind = GGML_TYPES[self._tensors[name].ggml_type]
        first, end = columns or (0, self.shapes[name][-1])
        if not self.is_quantized(name) or first % kind.block or end % kind.block:
            return None
        blocks_OB = self._blocks(name, rows).blocks_OB
        first, end = (column // kind.block * kind.num_bytes for column in (first, end))
        return GGMLWeight(blocks_OB[:, first:end].contiguous(), kind)

    def _blocks(self, name: str, rows: Span | None) -> GGMLWeight:
        """Return the quantized blocks of these rows. Blocks lie along a row, so rows can be sliced and reordered."""
        tensor = self._tensors[name]
        first, end = rows or (0, tensor.shape[0])
        row_bytes = tensor.num_bytes // tensor.shape[0]
        start = tensor.offset + first * row_bytes
        stored = np.frombuffer(self._data[tensor.file], np.uint8, (end - first) * row_bytes, start)
        blocks_OB = torch.from_numpy(stored).view(end - first, row_bytes)
        if tensor.interleaved_heads:
            blocks_OB = _deinterleave(blocks_OB, head_dim=tensor.shape[0] // tensor.interleaved_heads)
        return GGMLWeight(blocks_OB, GGML_TYPES[tensor.ggml_type])


def _map(file: Path) -> mmap.mmap:
    try:
        with file.open("rb") as opened:
            # torch requires writable memory.
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise SpecError(f"{file} cannot be read: {error}") from error


def _deinterleave(rows: Tensor, *, head_dim: int) -> Tensor:
    """Undo llama.cpp's interleaved order of rotary rows per head: 0, D/2, 1, D/2 + 1, … -> 0, 1, …, D/2, …"""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
