"""A model directory's weights as named tensors, of which a rank reads only its share."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.errors import SpecError
from cluster.gguf_table import GGML_TYPES, TABLE, GGMLType, read_table
from cluster.model_config import weight_files

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


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Open the weights of a model directory for reading. Raises SpecError."""
    if (model_dir / TABLE).exists():
        return GGUFCheckpoint(model_dir)
    return SafetensorsCheckpoint(model_dir)


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
        stored = self._file_of[name].get_slice(name)
        taken = slice(*rows or (None,))
        tensor: Tensor = stored[taken] if columns is None else stored[taken, slice(*columns)]
        return tensor


class GGUFCheckpoint:
    """The tensors of a table into GGUF files, dequantised as they are read."""

    def __init__(self, model_dir: Path) -> None:
        self._tensors = {tensor.name: tensor for tensor in read_table(model_dir)}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._data = {file: _map(Path(file)) for file in sorted({t.file for t in self._tensors.values()})}

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        tensor = self._tensors[name]
        # Quantised blocks lie along a row, so that rows can be taken without the rest, columns only afterwards.
        first, end = rows or (0, tensor.shape[0])
        row_bytes = tensor.num_bytes // tensor.shape[0]
        start = tensor.offset + first * row_bytes
        stored = np.frombuffer(self._data[tensor.file], np.uint8, (end - first) * row_bytes, start)
        values = _dequantize(stored, GGML_TYPES[tensor.ggml_type]).reshape(end - first, *tensor.shape[1:])
        if tensor.interleaved_heads:
            values = _deinterleave(values, head_dim=tensor.shape[0] // tensor.interleaved_heads)
        return values if columns is None else values[:, slice(*columns)]


def _dequantize(stored: NDArray[np.uint8], kind: GGMLType) -> Tensor:
    # gguf works through 16 rows at a time; rows of a hundred blocks, which need not be the matrix's, suit it best.
    num_blocks = len(stored) // kind.num_bytes
    wide = stored.reshape(-1, math.gcd(num_blocks, 128) * kind.num_bytes)
    return torch.from_numpy(dequantize(wide, GGMLQuantizationType[kind.name]))


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
