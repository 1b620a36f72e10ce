"""W8A8 products: exact for the quantized codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kernels.quant.int8_matmul import (
    launch_int8_product,
    launch_quantize_inputs,
)
from engine.layers.low_bit_matrix import Int8Matrix
from engine.weights.quantized_weight import GroupedWeight
from tests.engine.kernels.pools import DEVICE, DTYPES, random
from tests.support.product_references import reference_int8_product, reference_quantize_inputs

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@pytest.mark.parametrize("codes_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_quantization_equals_reference(dtype: torch.dtype, codes_dtype: torch.dtype) -> None:
    x = random(5, 200, dtype=dtype)
    x[3] = 0
    codes, scales = launch_quantize_inputs(x, codes_dtype)
    expected, expected_scales = reference_quantize_inputs(x, codes_dtype)
    assert torch.equal(codes.float(), expected.float()) and codes.shape == (5, 256)
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=1e-6)


def test_nan_and_inf_propagate() -> None:
    """Otherwise invalid logits would go unnoticed."""
    x, counters = random(3, 200), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    x[1, 150] = float("nan")
    got = launch_int8_product(x, *reference_quantize_inputs(random(70, 200, seed=1)), counters)
    assert got.isfinite().all(dim=1).tolist() == [True, False, True]
    assert not got[1].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(1, 70, 300), (17, 130, 128), (70, 40, 65)])
def test_products_are_exact(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, num_inputs, dtype=dtype), random(num_outputs, num_inputs, seed=1)
    bias, residual = random(num_outputs, dtype=dtype, seed=2), random(num_rows, num_outputs, dtype=dtype, seed=3)
    codes, scales = reference_quantize_inputs(weight)
    counters = torch.zeros(-(-num_outputs // 64), dtype=torch.int32, device=DEVICE)
    for extras in ({}, {"bias_O": bias, "residual_TO": residual}):
        got = launch_int8_product(x, codes, scales, counters, **extras)
        expected = reference_int8_product(x, codes, scales, counters, **extras)
        bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
        torch.testing.assert_close(got, expected, atol=10 * bound, rtol=bound)
    assert not counters.any(), "counters must be reset"


def test_stored_codes_are_multiplied_as_the_format_asks() -> None:
    """W8A8: weights of two projections, with activations quantized per row."""
    shapes = {"q": 70, "k": 30}
    weights = [
        GroupedWeight(
            (random(outputs, 200, seed=outputs) * 30).to(torch.int8),
            (random(outputs, 1, seed=1).abs() + 0.1).bfloat16(),
            None,
            torch.zeros(200, dtype=torch.int64),
            activations=torch.int8,
        )
        for outputs in shapes.values()
    ]
    matrix = Int8Matrix.as_stored(weights, DEVICE)
    assert matrix is not None
    x = random(3, 200)
    codes, scales = reference_quantize_inputs(x)
    numbers = torch.cat([weight.rows(0, weight.shape[0]) for weight in weights]).to(DEVICE)
    expected = (codes[:, :200].float() * scales[:, None]) @ numbers.T
    torch.testing.assert_close(matrix.multiply(x), expected, rtol=1e-5, atol=1e-3)
    assert Int8Matrix.as_stored([weights[0], replace(weights[1], activations=None)], DEVICE) is None
