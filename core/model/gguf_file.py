"""Reader of a GGUF file's header: its metadata and the location of its tensors.

The `gguf` package's reader makes an array of every string, which takes seconds for a vocabulary; this one takes a
fraction of a second. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.types.errors import SpecError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4


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
