"""Weights in .safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.model.config import weight_files
from core.types.errors import SpecError
from engine.weights.checkpoint import Shape, Span


class SafetensorsCheckpoint:
    """Implements Checkpoint over one or several memory-mapped files."""

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
            # get_slice does not support scalars.
            whole: Tensor = self._file_of[name].get_tensor(name)
            return whole
        stored = self._file_of[name].get_slice(name)
        taken = slice(*rows or (None,))
        tensor: Tensor = stored[taken] if columns is None else stored[taken, slice(*columns)]
        return tensor

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> None:
        return None
