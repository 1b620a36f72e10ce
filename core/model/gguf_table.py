"""Tensor table of a model directory that was made from GGUF files: the location of each weight in them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

TABLE = "gguf.json"


class GGMLType(NamedTuple):
    """Storage format of ggml: blocks of `block` values in `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


# Keyed by ggml's type number. Those that the gguf package can dequantize.
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
    """Return the name of a type of ggml."""
    known = GGML_TYPES.get(ggml_type)
    return known.name if known else _OTHER_TYPES.get(ggml_type, f"number {ggml_type}")


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

    def part(self, name: str, first: int, end: int) -> StoredTensor:
        """Return the rows [first, end) as a tensor of that name."""
        offset = self.offset + first * (self.num_bytes // self.shape[0])
        return replace(self, name=name, shape=(end - first, *self.shape[1:]), offset=offset)


def write_table(model_dir: Path, tensors: list[StoredTensor]) -> None:
    (model_dir / TABLE).write_text(json.dumps([asdict(tensor) for tensor in tensors]), encoding="utf-8")


def read_table(model_dir: Path) -> list[StoredTensor]:
    rows = json.loads((model_dir / TABLE).read_text(encoding="utf-8"))
    return [StoredTensor(**{**row, "shape": tuple(row["shape"])}) for row in rows]
