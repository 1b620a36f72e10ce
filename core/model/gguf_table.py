"""Tensor table of a model directory that was made from GGUF files: the location of each weight in them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

TABLE = "gguf.json"


class GGMLType(NamedTuple):
    """Storage format of ggml: blocks of `block` values in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


# Keyed by ggml's type number. Those that the gguf package can dequantize, except for the rare IQ and TQ types.
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
    30: GGMLType("BF16", 1, 2),
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Location of one tensor, under its Hugging Face name.

    interleaved_heads: if above 0, the rows are that many heads, in which llama.cpp placed row i + D/2 after row i.
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


def write_table(model_dir: Path, tensors: list[StoredTensor]) -> None:
    (model_dir / TABLE).write_text(json.dumps([asdict(tensor) for tensor in tensors]), encoding="utf-8")


def read_table(model_dir: Path) -> list[StoredTensor]:
    rows = json.loads((model_dir / TABLE).read_text(encoding="utf-8"))
    return [StoredTensor(**{**row, "shape": tuple(row["shape"])}) for row in rows]
