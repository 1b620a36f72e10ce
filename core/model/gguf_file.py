"""GGUF files: the header, with metadata and the place of each tensor, and the tensor table made from it.

The `gguf` package's reader makes an array of every string, which takes seconds for a vocabulary; this reader takes a
fraction of a second. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from core.types.errors import SpecError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
TABLE = "gguf.json"  # of a model directory that was made from GGUF files: the place of each weight in them


@dataclass(frozen=True)
class GGUFTensor:
    """Tensor of the file. `shape` is in torch's order: rows first, the contiguous dimension last."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata and tensor table."""

    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


def read_header(path: Path) -> GGUFHeader:
    """Read metadata and tensor table, without tensor data. Raises SpecError if the header is invalid or truncated."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not a usable GGUF file: {error}") from error


class _Cursor:
    """Sequential reader of the header. Raises struct.error or ValueError beyond the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise ValueError("its numbers are big-endian; convert it with gguf-convert-endian of the gguf package")
        if version not in _VERSIONS:
            raise ValueError(f"format version {version} is not supported; supported: {_VERSIONS}")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(num_values)}
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = tuple(GGUFTensor(name, kind, shape, start + offset) for name, kind, shape, offset in entries)
        return GGUFHeader(metadata, tensors)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = self._scalars("Q", num_dimensions)[::-1]
        return name, self._scalar("I"), shape, self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._scalar("I"), self._scalar("Q")
            if element in _SCALARS:
                return list(self._scalars(_SCALARS[element], count))
            if element != _STRING:
                raise ValueError(f"metadata array of unknown type {element}")
            return [self._string() for _ in range(count)]
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        raise ValueError(f"metadata of unknown type {kind}")

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode()

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}")))

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise ValueError("it ends inside its header; is the download complete?")
        taken = self._data[self._at : end]
        self._at = end
        return taken


class GGMLType(NamedTuple):
    """Storage format of ggml: blocks of `block` values in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


# Types that the gguf package can dequantize, by ggml's type number.
GGML_TYPES = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
}
# The other types of ggml, past ones included, and those of the fork ik_llama.cpp.
_OTHER_TYPES = {4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
_OTHER_TYPES |= {31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
_OTHER_TYPES |= {41: "Q1_0", 133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 137: "IQ2_K", 138: "IQ3_K", 139: "IQ4_K"}
_OTHER_TYPES |= {140: "IQ5_K", 141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS"}


def type_name(ggml_type: int) -> str:
    known = GGML_TYPES.get(ggml_type)
    return known.name if known else _OTHER_TYPES.get(ggml_type, f"number {ggml_type}")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Location of one tensor, under its Hugging Face name.

    interleaved_heads: if above 0, the number of heads in the rows; llama.cpp placed row i + D/2 of a head after row i.
    """

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    file: str  # absolute path
    offset: int  # bytes
    interleaved_heads: int = 0

    @property
    def num_bytes(self) -> int:
        kind = GGML_TYPES[self.ggml_type]
        return math.prod(self.shape) // kind.block * kind.num_bytes

    def part(self, name: str, first: int, end: int) -> StoredTensor:
        """Return the rows [first, end) as a tensor of that name."""
        offset = self.offset + first * (self.num_bytes // self.shape[0])
        return replace(self, name=name, shape=(end - first, *self.shape[1:]), offset=offset)


def write_table(model_dir: Path, tensors: list[StoredTensor]) -> None:
    (model_dir / TABLE).write_text(json.dumps([asdict(tensor) for tensor in tensors]), encoding="utf-8")


def read_table(model_dir: Path) -> list[StoredTensor]:
    rows = json.loads((model_dir / TABLE).read_text(encoding="utf-8"))
    return [StoredTensor(**{**row, "shape": tuple(row["shape"])}) for row in rows]
