"""Interface to a model directory's weights as named tensors, readable in slices for each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from core.types.errors import SpecError
from engine.weights.quantized_weight import QuantizedWeight

# [start, end) of a dimension
Span = tuple[int, int]
Shape = tuple[int, ...]

# Tensors listed in an error message.
_NAMED_AT_MOST = 5


class Checkpoint(Protocol):
    """Tensors of a model directory, under their Hugging Face names."""

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    def read(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """Read a tensor or a slice in its stored dtype (quantized ones as fp32). Raises SpecError."""
        ...

    def quantized(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> QuantizedWeight | None:
        """Read the quantized form; None if it is stored unquantized, or if the slice would cut a quantization block."""
        ...


def check_tensors(found: Mapping[str, Shape], expected: Mapping[str, Shape], *, optional: frozenset[str]) -> None:
    """Raise one SpecError that lists all differences. `optional` names may be present and are not read."""
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
        raise SpecError(f"weights do not match config.json: tensors {'; '.join(complaints)}")
