"""Detection of a model directory's checkpoint format."""

from __future__ import annotations

from pathlib import Path

from core.model.config import quantization_config
from core.model.config_file import has_own_format
from core.model.gguf_file import TABLE
from core.model.weight_formats import INSTEAD, check_format, check_method
from core.types.errors import SpecError
from engine.weights.checkpoint import FLOATS, Checkpoint, SafetensorsCheckpoint
from engine.weights.gguf_checkpoint import GGUFCheckpoint
from engine.weights.quantized_checkpoint import QuantizedCheckpoint

# Dtypes of buffers that old files keep beside the weights, such as position ids.
_COUNTERS = ("I64", "BOOL")


def open_checkpoint(model_dir: Path) -> Checkpoint:
    """Open the weights of a model directory for reading. Raises SpecError."""
    if (model_dir / TABLE).exists():
        return GGUFCheckpoint(model_dir)
    plain, config = SafetensorsCheckpoint(model_dir), quantization_config(model_dir)
    check_format(plain.shapes, has_own_format=has_own_format(model_dir))
    check_method(config)
    if config:
        return QuantizedCheckpoint(plain, config)
    coded = [
        name
        for name, kind in plain.dtypes.items()
        if kind not in FLOATS and (kind not in _COUNTERS or name.endswith(".weight"))
    ]
    if coded:
        kind = plain.dtypes[coded[0]]
        raise SpecError(f"{coded[0]} has dtype {kind}, and config.json has no quantization_config; {INSTEAD}")
    return plain


def is_quantized(model_dir: Path) -> bool:
    """Return True if a model directory's matrices may be quantized."""
    return (model_dir / TABLE).exists() or bool(quantization_config(model_dir))
