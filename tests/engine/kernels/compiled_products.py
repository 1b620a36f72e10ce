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

from engine.kernels.quant.code_panels import CodePanels, positions_of, span_of, words_of_a_unit
from engine.kernels.quant.code_words import E2M1, E4M3, FIVE_BITS, INT8, LEVELS, NIBBLES, SIX_BITS
from engine.kernels.quant.quantized_matmul import launch_expert_product, most_rows_of_experts
from engine.layers.low_bit_matrix import CodedMatrix
from engine.layers.low_bit_matrix import Int8Matrix
# ruff: isort: on

_O, _I, _P = 4096, 4096, 64
_EXPERTS = "experts of "
ROWS = (1, 17, 64, 300, 2048)
# Rows per tile of expert products.
TILES = (16, 32, 64, 128)
# kind, group, scales, minimums: none, "halves" or zero "codes". Scales in uint8 are nested. NVFP4 has factors too.
FORMS = {
    "fp8": (E4M3, 0, None, None),
    "fp8 blocks": (E4M3, 128, torch.float32, None),
    "MXFP8": (E4M3, 32, torch.float8_e8m0fnu, None),
    "int8 channels": (INT8, 0, None, None),
    "Q8_0": (INT8, 32, torch.float16, None),
    "int8 zeros": (INT8, 128, torch.bfloat16, "halves"),
    "NVFP4": (E2M1, 16, torch.float8_e4m3fn, None),
    "MXFP4": (E2M1, 32, torch.float8_e8m0fnu, None),
    "NF4": (LEVELS, 64, torch.float32, None),
    "int4 channels": (NIBBLES, 0, None, None),
    "AWQ": (NIBBLES, 128, torch.float16, "codes"),
    "Q4_0": (NIBBLES, 32, torch.float16, None),
    "Q4_1": (NIBBLES, 32, torch.float16, "halves"),
    "Q4_K": (NIBBLES, 32, torch.uint8, "codes"),
    "Q5_K": (FIVE_BITS, 32, torch.uint8, "codes"),
    "Q6_K": (SIX_BITS, 16, torch.uint8, None),
}


def panels(form: str) -> CodePanels:
    """Return panels without data."""
    kind, group, scales, least = FORMS[form]
    num_words, is_nested = words_of_a_unit(kind, group), scales == torch.uint8

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    def of_groups(dtype: torch.dtype) -> torch.Tensor:
        if dtype.itemsize > 1:
            return empty((_P, _I // group, 64), dtype)
        return empty((_P, _I // span_of(kind), 64, span_of(kind) // group), dtype)

    supers = empty((_P, _I // 256, 64), torch.float16) if is_nested else None
    return CodePanels(
        kind,
        group,
        (_O, _I),
        empty((_P, _I // positions_of(kind) // num_words, 64, num_words), torch.int16),
        None if scales is None else of_groups(scales),
        high=empty((_P, _I // 256, kind - 4, 64, num_words), torch.int16) if kind > NIBBLES else None,
        leasts=of_groups(torch.uint8 if least == "codes" else torch.float16) if least else None,
        supers=supers,
        super_leasts=supers if least else None,
        factors=empty((_P, 1, 64), torch.float32) if form == "NVFP4" or not group else None,
        levels=tuple(range(16)) if kind in (E2M1, LEVELS) else None,
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
