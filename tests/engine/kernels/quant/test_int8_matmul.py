"""W8A8 products: exact for the quantized codes."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.quant.int8_matmul import (
    launch_int8_product,
    launch_quantize_to_int8,
    reference_int8_product,
    reference_quantize_to_int8,
)
from tests.engine.kernels.pools import DEVICE, DTYPES, random

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_quantization_equals_reference(dtype: torch.dtype) -> None:
    x = random(5, 200, dtype=dtype)
    x[3] = 0
    codes, scales = launch_quantize_to_int8(x)
    expected, expected_scales = reference_quantize_to_int8(x)
    assert torch.equal(codes, expected) and codes.shape == (5, 256)
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=1e-6)


def test_nan_and_inf_propagate() -> None:
    """Otherwise invalid logits would go unnoticed."""
    x, counters = random(3, 200), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    x[1, 150] = float("nan")
    got = launch_int8_product(x, *reference_quantize_to_int8(random(70, 200, seed=1)), counters)
    assert got.isfinite().all(dim=1).tolist() == [True, False, True]
    assert not got[1].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(1, 70, 300), (17, 130, 128), (70, 40, 65)])
def test_products_are_exact(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, num_inputs, dtype=dtype), random(num_outputs, num_inputs, seed=1)
    bias, residual = random(num_outputs, dtype=dtype, seed=2), random(num_rows, num_outputs, dtype=dtype, seed=3)
    codes, scales = reference_quantize_to_int8(weight)
    counters = torch.zeros(-(-num_outputs // 64), dtype=torch.int32, device=DEVICE)
    for extras in ({}, {"bias_O": bias, "residual_TO": residual}):
        got = launch_int8_product(x, codes, scales, counters, **extras)
        expected = reference_int8_product(x, codes, scales, counters, **extras)
        bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
        torch.testing.assert_close(got, expected, atol=10 * bound, rtol=bound)
    assert not counters.any(), "counters must be reset"
