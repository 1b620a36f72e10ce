"""Detection of a model directory's checkpoint format."""

from __future__ import annotations

from pathlib import Path

from core.model.config import quantization_config
from core.model.gguf_table import TABLE
from engine.weights.checkpoint import Checkpoint
from engine.weights.gguf_checkpoint import GGUFCheckpoint
from engine.weights.quantized_checkpoint import QuantizedCheckpoint
from engine.weights.safetensors_checkpoint import SafetensorsCheckpoint


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Open the weights of a model directory for reading. Raises SpecError."""
    if (model_dir / TABLE).exists():
        return GGUFCheckpoint(model_dir)
    plain = SafetensorsCheckpoint(model_dir)
    config = quantization_config(model_dir)
    return QuantizedCheckpoint(plain, config) if config else plain


def is_quantized(model_dir: Path) -> bool:
    """Return True if a model directory's matrices may be quantized."""
    return (model_dir / TABLE).exists() or bool(quantization_config(model_dir))
