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
    """Checkpoint over memory-mapped .safetensors files. dtypes: safetensors' names, such as F32."""

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
        # A checkpoint saved from the base model lacks the prefix `model.`. So do draft heads, which also have `fc`.
        is_base = "embed_tokens.weight" in located and "fc.weight" not in located
        opened = {path: safe_open(path, framework="pt") for path in sorted(set(located.values()))}
        self._stored: dict[str, tuple[Any, str]] = {  # file, and the tensor's name in it
            f"model.{name}" if is_base and not name.startswith("lm_head.") else name: (opened[path], name)
            for name, path in located.items()
        }
        slices = {name: file.get_slice(stored) for name, (file, stored) in self._stored.items()}
        self.shapes: dict[str, Shape] = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
        self.dtypes: dict[str, str] = {name: tensor.get_dtype() for name, tensor in slices.items()}

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        file, stored = self._stored[name]
        if rows is None and columns is None:
            # get_slice does not support scalars.
            whole: Tensor = file.get_tensor(stored)
            return whole
        taken, part = slice(*rows or (None,)), file.get_slice(stored)
        tensor: Tensor = part[taken] if columns is None else part[taken, slice(*columns)]
        return tensor

    def is_quantized(self, name: str) -> bool:
        return False

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> None:
        return None
