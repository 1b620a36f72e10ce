"""Program: runs low-bit products of an 8B model's matrix on an absent GPU, and prints the launches.

python -m tests.engine.kernels.compiled_products 9.0 fp8 Q4_K "experts of AWQ" …
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

# ruff: isort: off
from tests.engine.kernels.absent_gpu import DEVICE, absent_gpu

import torch

from engine.kernels.quant.code_panels import CodePanels, words_of_a_unit
from engine.kernels.quant.code_words import E4M3, FIVE_BITS, INT8, NIBBLES, SIX_BITS
from engine.kernels.quant.quantized_matmul import launch_expert_product, most_rows_of_experts
from engine.layers.low_bit_matrix import CodedMatrix
from engine.layers.int8_matrix import Int8Matrix
# ruff: isort: on

_O, _I, _P = 4096, 4096, 64
_EXPERTS = "experts of "
ROWS = (1, 17, 64, 300, 2048)
# Rows per tile of expert products.
TILES = (16, 32, 64, 128)
# kind, group, minimums: none, "halves" or zero "codes"; nested scales.
FORMS = {
    "fp8": (E4M3, 0, None, False),
    "fp8 blocks": (E4M3, 128, None, False),
    "int8 channels": (INT8, 0, None, False),
    "Q8_0": (INT8, 32, None, False),
    "AWQ": (NIBBLES, 128, "codes", False),
    "Q4_0": (NIBBLES, 32, None, False),
    "Q4_1": (NIBBLES, 32, "halves", False),
    "Q4_K": (NIBBLES, 32, "codes", True),
    "Q5_K": (FIVE_BITS, 32, "codes", True),
    "Q6_K": (SIX_BITS, 16, None, True),
}


def panels(form: str) -> CodePanels:
    """Return panels without data."""
    kind, group, least, is_nested = FORMS[form]
    num_words = words_of_a_unit(kind, group)
    inputs = num_words * (2 if kind < NIBBLES else 4)
    scale = torch.uint8 if is_nested else torch.float32 if kind == E4M3 or not group else torch.float16
    of_group, of_run = (_P, _I // (group or _I), 64), (_P, _I // 256, 64)
    in_runs = (*of_run, 256 // (group or 256))

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    return CodePanels(
        kind,
        group,
        (_O, _I),
        empty((_P, _I // inputs, 64, num_words), torch.int16),
        empty(in_runs if is_nested else of_group, scale),
        high=empty((_P, _I // 256, kind - 4, 64, num_words), torch.int16) if kind > NIBBLES else None,
        leasts={"codes": empty(in_runs, torch.uint8), "halves": empty(of_group, torch.float16)}.get(least),
        supers=empty(of_run, torch.float16) if is_nested else None,
        super_leasts=empty(of_run, torch.float16) if is_nested and least else None,
    )


def multiply_by_experts(form: str) -> None:
    """Multiply in tiles of every size, from a decode step's choices to a prompt's."""
    one = panels(form)
    several = replace(one, **{name: of.expand(8, *of.shape) for name, of in one.tensors().items()})
    x = torch.empty(300, _I, dtype=torch.bfloat16, device=DEVICE)
    for rows in TILES[: TILES.index(most_rows_of_experts(one, DEVICE)) + 1]:
        choices, experts = (torch.empty(size, dtype=torch.int32, device=DEVICE) for size in (16 * rows, 16))
        launch_expert_product(x, several, choices, experts, len(x), of_each=1)


def main() -> None:
    capability = tuple(int(number) for number in sys.argv[1].split("."))
    for form in sys.argv[2:]:
        with absent_gpu(capability) as launches:
            if form.startswith(_EXPERTS):
                multiply_by_experts(form.removeprefix(_EXPERTS))
                matrix = None
            elif form == "int8 rows":
                counters = torch.zeros(_P, dtype=torch.int32, device=DEVICE)
                codes = torch.empty(_O, _I, dtype=torch.int8, device=DEVICE)
                matrix = Int8Matrix(codes, torch.empty(_O, device=DEVICE), _I, counters)
            else:
                matrix = CodedMatrix.whole(panels(form))
            for count in ROWS if matrix else ():
                x, residual = (torch.empty(count, width, dtype=torch.bfloat16, device=DEVICE) for width in (_I, _O))
                assert matrix.multiply(x, residual_TO=residual).shape == (count, _O)
        print(json.dumps({"form": form, "launches": [asdict(launch) for launch in launches]}), flush=True)


if __name__ == "__main__":
    main()
