"""Weights in .safetensors files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from core.model.weight_files import locate_tensors, weight_files
from engine.weights.checkpoint import Shape, Span

logger = logging.getLogger(__name__)

# Dtypes of values that are stored as they are.
FLOATS = ("F64", "F32", "F16", "BF16")
_LOGGED = 3  # tensors named in a log line


class SafetensorsCheckpoint:
    """Implements Checkpoint over one or several memory-mapped files. dtypes: in safetensors' words, such as F32."""

    def __init__(self, model_dir: Path) -> None:
        files = weight_files(model_dir)
        located, self.unindexed = locate_tensors(files)
        if files.note:
            logger.warning("%s: %s", model_dir, files.note)
        if self.unindexed:
            named = ", ".join(sorted(self.unindexed)[:_LOGGED])
            logger.warning(
                "%s: %d tensors that the index does not name are not read: %s", model_dir, len(self.unindexed), named
            )
        opened = {path: safe_open(path, framework="pt") for path in sorted(set(located.values()))}
        self._file_of: dict[str, Any] = {name: opened[path] for name, path in located.items()}
        stored = {name: file.get_slice(name) for name, file in self._file_of.items()}
        self.shapes: dict[str, Shape] = {name: tuple(tensor.get_shape()) for name, tensor in stored.items()}
        self.dtypes: dict[str, str] = {name: tensor.get_dtype() for name, tensor in stored.items()}

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        if rows is None and columns is None:
            # get_slice does not support scalars.
            whole: Tensor = self._file_of[name].get_tensor(name)
            return whole
        stored = self._file_of[name].get_slice(name)
        taken = slice(*rows or (None,))
        tensor: Tensor = stored[taken] if columns is None else stored[taken, slice(*columns)]
        return tensor

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> None:
        return None
