"""Where the weights of a model directory lie that was made from GGUF files, and still points into them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

TABLE = "gguf.json"


class GGMLType(NamedTuple):
    """How ggml stores numbers: blocks of `block` values in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


# By ggml's own number. Those that the gguf package can turn back into floats, without the rarely used IQ and TQ ones.
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
    """One tensor, under the name that it has in a Hugging Face checkpoint.

    `interleaved_heads` > 0: its rows are that many heads, in each of which llama.cpp put row i + D/2 behind row i.
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
    (model_dir / TABLE).write_text(json.dumps([asdict(tensor) for tensor in tensors]))


def read_table(model_dir: Path) -> list[StoredTensor]:
    rows = json.loads((model_dir / TABLE).read_text())
    return [StoredTensor(**{**row, "shape": tuple(row["shape"])}) for row in rows]
