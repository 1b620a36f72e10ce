"""A model directory's weights as named tensors, of which a rank reads only its share."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.model.config import quantization_config, weight_files
from cluster.model.gguf_table import GGML_TYPES, TABLE, read_table
from cluster.words.errors import SpecError
from engine.weights.quantized_weight import GGMLWeight, QuantizedWeight

Span = tuple[int, int]  # [start, end) of a dimension
Shape = tuple[int, ...]

_NAMED_AT_MOST = 5  # tensors in an error message


class Checkpoint(Protocol):
    """The tensors of a model directory, under their Hugging Face names."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """A tensor, or a part of it, in whatever dtype it is stored (quantised ones as fp32). Raises SpecError."""
        ...

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> QuantizedWeight | None:
        """The same as it is stored, in few bits; None where it is not, or where the part would cut through blocks."""
        ...


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Open the weights of a model directory for reading. Raises SpecError."""
    if (model_dir / TABLE).exists():
        return GGUFCheckpoint(model_dir)
    checkpoint = SafetensorsCheckpoint(model_dir)
    if config := quantization_config(model_dir):
        from engine.weights.quantized_checkpoint import QuantizedCheckpoint  # which is built on this module

        return QuantizedCheckpoint(checkpoint, config)
    return checkpoint


def check_tensors(found: Mapping[str, Shape], expected: Mapping[str, Shape], *, optional: frozenset[str]) -> None:
    """Raise one SpecError that names every kind of difference. `optional` names may be there and are not read."""
    missing = [name for name in expected if name not in found]
    # Buffers that old versions of transformers saved; they follow from the config.
    surplus = [n for n in found if n not in expected and n not in optional and not n.endswith("rotary_emb.inv_freq")]
    wrong = [
        f"{name} is {found[name]}, not {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    complaints = [
        f"{what}: {', '.join(names[:_NAMED_AT_MOST])}" + (" …" if len(names) > _NAMED_AT_MOST else "")
        for what, names in (("missing", missing), ("not expected", surplus), ("wrong shape", wrong))
        if names
    ]
    if complaints:
        raise SpecError(f"the weights do not fit config.json; tensors {'; '.join(complaints)}")


class SafetensorsCheckpoint:
    """One or several .safetensors files, mapped into memory."""

    def __init__(self, model_dir: Path) -> None:
        self.shapes: dict[str, Shape] = {}
        self._file_of: dict[str, Any] = {}
        for path in weight_files(model_dir):
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise SpecError(f"{path}: not a usable safetensors file: {error}") from error
            for name in file.keys():
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
                self._file_of[name] = file

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        if rows is None and columns is None:
            whole: Tensor = self._file_of[name].get_tensor(name)  # which may have no dimension at all
            return whole
        stored = self._file_of[name].get_slice(name)
        taken = slice(*rows or (None,))
        tensor: Tensor = stored[taken] if columns is None else stored[taken, slice(*columns)]
        return tensor

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> None:
        return None


class GGUFCheckpoint:
    """The tensors of a table into GGUF files."""

    def __init__(self, model_dir: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in read_table(model_dir)}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._data = {file: _map(Path(file)) for file in sorted({t.file for t in self._tensors.values()})}

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        tensor, blocks = self._tensors[name], self._blocks(name, rows)
        values = blocks.rows(0, len(blocks.blocks_OB)).view(-1, *tensor.shape[1:])
        return values if columns is None else values[:, slice(*columns)]

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> GGMLWeight | None:
        kind = GGML_TYPES[self._tensors[name].ggml_type]
        first, end = columns or (0, self.shapes[name][-1])
        if kind.block == 1 or first % kind.block or end % kind.block:
            return None
        blocks_OB = self._blocks(name, rows).blocks_OB
        first, end = (column // kind.block * kind.num_bytes for column in (first, end))
        return GGMLWeight(blocks_OB[:, first:end].contiguous(), kind)

    def _blocks(self, name: str, rows: Span | None) -> GGMLWeight:
        """Quantised blocks lie along a row, so that rows can be taken, and put in order, without touching them."""
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
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants writable memory
    except (OSError, ValueError) as error:
        raise SpecError(f"{file}: cannot be read: {error}") from error


def _deinterleave(rows: Tensor, *, head_dim: int) -> Tensor:
    """Undo llama.cpp's order of rotary rows in each head: 0, D/2, 1, D/2 + 1, … -> 0, 1, …, D/2, …"""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
