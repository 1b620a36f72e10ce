"""A model directory's weights as named tensors, of which a rank reads only its share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from core.types.errors import SpecError
from engine.weights.quantized_weight import QuantizedWeight

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
