"""Products of one CPU thread with a matrix of 4096 x 4096 in every stored format, beside bf16 and int8.

    python -m benchmarks.engine.cpu_products

Prints the CPU milliseconds per product by rows and format, the best of interleaved tries, each in the way that the
engine takes on this machine (vectors, AMX or torch). With few rows, copies of the matrix alternate, so that no cache
holds the next one. `torch` multiplies the matrix in bf16 (F.linear).
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from engine.cpu.autotune import MeasuredWays
from engine.cpu.library import load_kernels
from engine.layers.layers import Matrix, TorchMatrix
from engine.layers.packed_matrix import PackedMatrix
from engine.weights.quantized_weight import E2M1_LEVELS, GroupedWeight, pack_4_bits

_SIZE = 4096
_ROWS = (1, 8, 32, 64, 512)
_TRIES = 24
# Bytes of the copies of one matrix that alternate.
_BYTES = 100 << 20


def main() -> None:
    torch.set_num_threads(1)
    matrices: dict[str, list[TorchMatrix] | list[PackedMatrix]] = {
        "torch": [TorchMatrix(torch.randn(_SIZE, _SIZE).bfloat16())],
        **_packed(),
    }
    for num_rows in _ROWS:
        x_TI = torch.randn(num_rows, _SIZE).bfloat16()
        turns: dict[str, cycle[Matrix]] = {name: cycle(copies) for name, copies in matrices.items()}
        best = dict.fromkeys(matrices, float("inf"))
        for _ in range(1 + _TRIES // (1 + num_rows // 32)):
            for name, copies in turns.items():
                begin = time.thread_time()
                next(copies).multiply(x_TI)
                best[name] = min(best[name], time.thread_time() - begin)
        print(json.dumps({"rows": num_rows, "ms": {name: round(s * 1e3, 3) for name, s in best.items()}}), flush=True)


def _packed() -> dict[str, list[PackedMatrix]]:
    kernels = load_kernels()
    assert kernels is not None, "no C++ compiler here"
    plain_OI = torch.randn(_SIZE, _SIZE)
    first = {"bf16": PackedMatrix.bf16(kernels, plain_OI), "int8": PackedMatrix.int8(kernels, plain_OI)}
    for name, weight in _weights().items():
        coded = PackedMatrix.few_bits(kernels, [weight])
        assert coded is not None
        first[name] = coded
    measured = MeasuredWays.of_this_machine(kernels.version)
    for matrix in first.values():
        matrix.measure(measured)
    return {
        name: [matrix, *(_copy(matrix) for _ in range(_BYTES // matrix.num_bytes))] for name, matrix in first.items()
    }


def _copy(matrix: PackedMatrix) -> PackedMatrix:
    parts = [
        replace(part, tensors={name: each.clone() for name, each in part.tensors.items()}) for part in matrix._parts
    ]
    copy = PackedMatrix(matrix._kernels, matrix.num_inputs, *parts)
    copy.tile_rows, copy.torch_rows = matrix.tile_rows, matrix.torch_rows
    return copy


def _weights() -> dict[str, GroupedWeight]:
    codes_OI = torch.randint(0, 16, (_SIZE, _SIZE))
    e2m1, levels = torch.tensor(E2M1_LEVELS), torch.randn(16)

    def nibbles(size: int, dtype: torch.dtype, zero: int | None = None, levels: Tensor | None = None) -> GroupedWeight:
        group_I = torch.arange(_SIZE) // size
        # Powers of two, which every dtype holds.
        scales_OG = torch.full((_SIZE, _SIZE // size), 0.25)
        scales_OG[0, 0] = 0.25 if dtype == torch.float8_e8m0fnu else 0.1875 if dtype != torch.float32 else 0.1
        zeros_OG = None if zero is None else torch.full_like(scales_OG, zero)
        return GroupedWeight(pack_4_bits(codes_OI), scales_OG.to(dtype), zeros_OG, group_I, levels)

    def bytes_in(size: int, dtype: torch.dtype, scale: float) -> GroupedWeight:
        scales_OG = torch.full((_SIZE, _SIZE // size), scale)
        return GroupedWeight((torch.randn(_SIZE, _SIZE) * 30).to(dtype), scales_OG, None, torch.arange(_SIZE) // size)

    return {
        "Q4_0": nibbles(32, torch.float16, 8),
        "INT4 in 128": nibbles(128, torch.float16, 7),
        "NVFP4": nibbles(16, torch.float8_e4m3fn, levels=e2m1),
        "MXFP4": nibbles(32, torch.float8_e8m0fnu, levels=e2m1),
        "NF4": nibbles(64, torch.float32, levels=levels),
        "INT8 per channel": bytes_in(_SIZE, torch.int8, 0.1),
        "FP8 in 128": bytes_in(128, torch.float8_e4m3fn, 0.1),
        "MXFP8": bytes_in(32, torch.float8_e4m3fn, 0.25),
    }


if __name__ == "__main__":
    main()
