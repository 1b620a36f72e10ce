"""Low-bit matrix products on a GPU, with Llama 3 8B's matrices, for few rows and for a prompt, compared with bf16
(F.linear)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.moe.fused_experts import launch_coded_experts, launch_fused_experts
from engine.kernels.quant.code_panels import CodePanels
from engine.kernels.quant.code_words import E4M3, NIBBLES
from engine.layers.code_parts import CodeRows, panels_of
from engine.layers.layers import Matrix
from engine.layers.low_bit_matrix import CodedMatrix, Int8Matrix

# T tokens, I input features, O output features, G groups of inputs

_SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
_ROWS = (1, 8, 64)
_PROMPT = 2048
# Bytes of the copies that alternate, so that no cache holds the next one.
_BYTES = 200 << 20
# Number of experts, experts per token, hidden size, features.
_EXPERTS = 64, 8, 2048, 768

Seconds = Callable[[Callable[[], object]], float]


def bench_products(device: torch.device, seconds: Seconds, copy_bytes_s: float) -> Iterator[dict[str, Any]]:
    """Yield name, microseconds, gb_s and share of the copy rate for the stored bytes, and ratio.

    ratio: time of the same product in bf16 divided by this time.
    """
    for place, (num_outputs, num_inputs) in _SHAPES.items():
        num_bytes = 2 * num_outputs * num_inputs
        plain = [_random(num_outputs, num_inputs, device) for _ in range(1 + _BYTES // num_bytes)]
        rows = {count: _random(count, num_inputs, device) for count in (*_ROWS, _PROMPT)}
        in_bf16 = {
            count: seconds(_recorded([partial(F.linear, x_TI, weight) for weight in plain])) / len(plain)
            for count, x_TI in rows.items()
        }
        del plain
        for form, make in _FORMS.items():
            first = make(num_outputs, num_inputs, device)
            num_bytes = _num_bytes(first)
            matrices = [first, *(make(num_outputs, num_inputs, device) for _ in range(_BYTES // num_bytes))]
            for count, x_TI in rows.items():
                run = _recorded([partial(matrix.multiply, x_TI) for matrix in matrices])
                took = seconds(run) / len(matrices)
                name = f"product {form} {place} {count}"
                yield _result(name, took, num_bytes, copy_bytes_s, in_bf16[count])
    yield from _experts(device, seconds, copy_bytes_s)


def _experts(device: torch.device, seconds: Seconds, copy_bytes_s: float) -> Iterator[dict[str, Any]]:
    num_experts, per_token, hidden, features = _EXPERTS
    shapes = (2 * features, hidden), (hidden, features)
    plain = [_random(num_experts * o, i, device).view(num_experts, o, i) for o, i in shapes]
    coded = [CodePanels.stack([_fp8_blocks(o, i, device) for _ in range(num_experts)]) for o, i in shapes]
    for name, num_tokens in (("decode", 64), ("prefill", 8192)):
        x_TE = _random(num_tokens, hidden, device)
        chosen = torch.rand(num_tokens, num_experts, device=device).topk(per_token, dim=-1).indices
        in_bf16 = seconds(partial(launch_fused_experts, x_TE, plain[0], plain[1], chosen))
        assert coded[0] is not None and coded[1] is not None
        took = seconds(partial(launch_coded_experts, x_TE, coded[0], coded[1], chosen))
        # The choices of 64 tokens hit every expert.
        num_bytes = coded[0].num_bytes + coded[1].num_bytes
        yield _result(f"coded_experts fp8 {name}", took, num_bytes, copy_bytes_s, in_bf16)


def _result(name: str, took: float, num_bytes: int, copy_bytes_s: float, in_bf16: float) -> dict[str, Any]:
    rate = num_bytes / took
    return {
        "name": name,
        "microseconds": took * 1e6,
        "gb_s": rate / 1e9,
        "share": rate / copy_bytes_s,
        "ratio": in_bf16 / took,
    }


def _recorded(products: list[Callable[[], Tensor]]) -> Callable[[], object]:
    """Capture all products in one graph, as in a decode step, so that the host's time does not count."""
    for product in products:
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()
    return graph.replay


def _random(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)


def _num_bytes(matrix: Matrix) -> int:
    if isinstance(matrix, Int8Matrix):
        return matrix.codes_OI.nbytes + matrix.scales_O.nbytes
    assert isinstance(matrix, CodedMatrix)
    return matrix.num_bytes


def _codes(num_outputs: int, num_inputs: int, device: torch.device, most: int) -> Tensor:
    return torch.randint(0, most, (num_outputs, num_inputs), dtype=torch.uint8, device=device)


def _fp8_blocks(num_outputs: int, num_inputs: int, device: torch.device) -> CodePanels:
    codes_OI = _random(num_outputs, num_inputs, device).to(torch.float8_e4m3fn).view(torch.uint8)
    scales_OG = torch.rand(num_outputs, -(-num_inputs // 128), device=device)
    return panels_of([CodeRows(E4M3, 128, codes_OI, {"scales": scales_OG})])


def _fp8(num_outputs: int, num_inputs: int, device: torch.device) -> Matrix:
    codes_OI = _random(num_outputs, num_inputs, device).to(torch.float8_e4m3fn).view(torch.uint8)
    factors_O1 = torch.rand(num_outputs, 1, device=device)
    return CodedMatrix.whole(panels_of([CodeRows(E4M3, 0, codes_OI, {"factors": factors_O1})]))


def _int8(num_outputs: int, num_inputs: int, device: torch.device) -> Matrix:
    return Int8Matrix.of(_random(num_outputs, num_inputs, device))


def _groups(num_outputs: int, num_inputs: int, device: torch.device) -> Matrix:
    """Return a matrix with groups of 128, as in AWQ and GPTQ."""
    numbers = {
        "scales": torch.rand(num_outputs, num_inputs // 128, device=device).half(),
        "leasts": _codes(num_outputs, num_inputs // 128, device, 16),
    }
    return CodedMatrix.whole(panels_of([CodeRows(NIBBLES, 128, _codes(num_outputs, num_inputs, device, 16), numbers)]))


def _q4_k(num_outputs: int, num_inputs: int, device: torch.device) -> Matrix:
    supers_ON = torch.rand(num_outputs, num_inputs // 256, device=device).half()
    numbers = {
        "scales": _codes(num_outputs, num_inputs // 32, device, 64),
        "leasts": _codes(num_outputs, num_inputs // 32, device, 64),
        "supers": supers_ON,
        "super_leasts": supers_ON,
    }
    return CodedMatrix.whole(panels_of([CodeRows(NIBBLES, 32, _codes(num_outputs, num_inputs, device, 16), numbers)]))


_FORMS: dict[str, Callable[[int, int, torch.device], Matrix]] = {
    "fp8": _fp8,
    "int8": _int8,
    "4 bits in 128": _groups,
    "Q4_K": _q4_k,
}
