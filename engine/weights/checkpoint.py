"""A model directory's weights as named tensors, readable in slices for each rank; .safetensors files as stored."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from core.model.weight_files import locate_tensors, weight_files
from core.types.errors import SpecError
from engine.weights.quantized_weight import QuantizedWeight

# [start, end) of a dimension
Span = tuple[int, int]
Shape = tuple[int, ...]

logger = logging.getLogger(__name__)

# Tensors listed in a message.
_NAMED_AT_MOST = 5
_LAYER = re.compile(r"(.*\.)?layers\.\d+\.")
# Names of scales of the KV cache, of activations and of attention's intermediate results.
_SCALE = re.compile(
    r"(^|\.)((k|v|q|kv|prob|prob_output|input|output)_(scale|scale_ub|global_scale|zero_point)|(k|v)_bias|"
    r"activation_scale(_inv)?|qscale_act)$"
)
# Buffers that old versions of transformers saved; they follow from the config.
_BUFFER = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_ZEROS = (".bias", "zero_point")
# Dtypes of values that are stored as they are.
FLOATS = ("F64", "F32", "F16", "BF16")
_LOGGED = 3  # tensors named in a log line


class Checkpoint(Protocol):
    """Tensors of a model directory, under their Hugging Face names."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def unindexed(self) -> Collection[str]:
        """Names of tensors that the files hold and the index omits; they are not read."""
        ...

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """Read a tensor or a slice in its stored dtype (quantized ones as fp32). Raises SpecError."""
        ...

    def is_quantized(self, name: str) -> bool:
        """Return True if the tensor is stored quantized."""
        ...

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> QuantizedWeight | None:
        """Read the quantized form; None if it is stored unquantized, or if the slice would cut a quantization block."""
        ...


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, Shape],
    *,
    optional: frozenset[str] = frozenset(),
    prefix: str | tuple[str, ...] = "",
) -> None:
    """Raise one SpecError that lists all differences of the tensors whose names start with `prefix`, or one of them.

    Tensors in `optional` may be present and are not read. Other surplus tensors pass only if they cannot change the
    result: zero biases and zero points; scales of KV and activations, which this engine computes itself; and, as in
    transformers, tensors outside the modules of `expected`. The last two are logged.
    """
    found = {name: shape for name, shape in checkpoint.shapes.items() if name.startswith(prefix)}
    missing = [name for name in expected if name not in found]
    wrong = [f"{name} is {found[name]}, not {shape}" for name, shape in expected.items()
             if name in found and found[name] != shape]  # fmt: skip
    surplus = [name for name in found if name not in expected and name not in optional and not _BUFFER.search(name)]
    scales = [name for name in surplus if _SCALE.search(name)]
    owners = tuple({_owner(name) for name in (*expected, *optional)})
    inside = [name for name in surplus if name.startswith(owners) and name not in scales]
    outside = [name for name in surplus if not name.startswith(owners) and name not in scales]
    refused = [name for name in inside if not name.endswith(_ZEROS) or bool(checkpoint.read(name).float().any())]
    if missing or wrong:
        refused += outside  # probably the missing ones under other names
    complaints = [
        f"{what}: {listed(names)}"
        for what, names in (("missing", missing), ("not expected", refused), ("wrong shape", wrong))
        if names
    ]
    if any(name in checkpoint.unindexed for name in missing):
        complaints.append("the index leaves some out; remove it to read all tensors of the files")
    if any(name.endswith(".bias") for name in refused):
        complaints.append("biases that are not zero need attention_bias or mlp_bias: true")
    if complaints:
        raise SpecError(f"weights do not match config.json: tensors {'; '.join(complaints)}")
    if scales:
        logger.warning("not used, because KV and activations have their own scales: tensors %s", listed(scales))
    if outside:
        logger.warning("not part of the model, and not read: tensors %s", listed(outside))


def expected_matrices(prefix: str, matrices: Mapping[str, tuple[Shape, bool]]) -> dict[str, Shape]:
    """Return the tensors of matrices. matrices: by name, the shape and whether there is a bias."""
    tensors: dict[str, Shape] = {f"{prefix}.{name}.weight": shape for name, (shape, _) in matrices.items()}
    return tensors | {f"{prefix}.{name}.bias": shape[:1] for name, (shape, has_bias) in matrices.items() if has_bias}


def _owner(name: str) -> str:
    """Return the prefix of a tensor's layer, or of its module outside layers."""
    match = _LAYER.match(name)
    return match[0] if match else name.rpartition(".")[0] + "."


def listed(names: Sequence[str]) -> str:
    """Join the first few names for a message."""
    return ", ".join(names[:_NAMED_AT_MOST]) + (" …" if len(names) > _NAMED_AT_MOST else "")


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
