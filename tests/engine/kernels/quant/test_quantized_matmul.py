"""Low-bit products equal those of the dequantized weights; each stored byte is read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cpu.autotune import FP8, MeasuredWays, Ways
from engine.kernels.gated_mul import GatedActivation
from engine.kernels.moe.expert_tiles import launch_sort_into_tiles
from engine.kernels.moe.fused_experts import launch_coded_experts
from engine.kernels.quant import quantized_matmul
from engine.kernels.quant.code_panels import CodePanels
from engine.kernels.quant.int8_matmul import launch_int8_product, launch_quantize_inputs
from engine.kernels.quant.quantized_matmul import launch_coded_product, launch_widen, new_counters
from engine.layers.code_parts import panels_of, rows_of
from engine.layers.layers import TorchMatrix
from engine.layers.low_bit_matrix import CodedMatrix, Int8Matrix
from engine.weights.quantized_weight import GGMLWeight, GroupedWeight, QuantizedWeight
from tests.engine.coded_weights import GROUPED, OF_GGUF, random_weight, shape_of
from tests.engine.kernels.interpreter import count_reads
from tests.engine.kernels.moe.test_moe import biases, choices
from tests.engine.kernels.pools import DEVICE, DTYPES, random
from tests.support.grids import quick
from tests.support.product_references import (
    numbers_of,
    reference_coded_experts,
    reference_coded_product,
    reference_int8_product,
    reference_quantize_inputs,
)

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

FORMATS = [*OF_GGUF, *GROUPED]
# One of each kind of code, scale, zero and order.
_VARIED = (
    "Q4_0",
    "Q5_1",
    "Q4_K",
    "Q6_K",
    "fp8 blocks",
    "mxfp8",
    "int8 groups",
    "int8 channels with zeros",
    "nvfp4",
    "nf4",
)
_VARIED += ("int4 channels", "groups of 16", "broken zeros", "groups in any order")
# One of each kind of code.
_FEW = ("Q4_K", "fp8 blocks", "int8 groups", "nvfp4", "nf4", "broken zeros")
# Relative to the norm.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_numbers_equal_the_format(name: str) -> None:
    if name in OF_GGUF:
        pytest.importorskip("gguf")
    weight = random_weight(name, *shape_of(name, 70, 416))
    rows = rows_of(weight, DEVICE)
    assert rows is not None
    expected = weight.rows(0, 70).to(DEVICE)
    numbers = numbers_of(panels_of([rows]))
    if rows.order_I is not None:
        expected = expected[:, rows.order_I]
    torch.testing.assert_close(numbers, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [DTYPES[-1]] if DEVICE.type == "cuda" else [torch.float32], ids=str)
@pytest.mark.parametrize("name", quick(FORMATS, _VARIED))
def test_products_equal_those_of_the_numbers(name: str, dtype: torch.dtype) -> None:
    """One row, rows that do not fill a tile, and more than one tile; with and without split inputs."""
    weight = random_weight(name, *shape_of(name, 70, 416))
    panels, order_I = panels_and_order(weight)
    for num_rows, splits in ((1, 1), (17, 2)):
        x = random(num_rows, weight.shape[1], dtype=dtype, seed=3)
        x = x if order_I is None else x.index_select(1, order_I)
        expected = x.double() @ numbers_of(panels).double().T
        got = launched(x, panels, splits=splits)
        assert (got - expected).norm() < TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("name", quick(["Q4_K", "Q6_K", "fp8 channels", "groups of 128"], ["Q4_K", "fp8 channels"]))
def test_many_rows_equal_dequantized_product(name: str) -> None:
    weight = random_weight(name, 130, 256)
    panels, _ = panels_and_order(weight)
    x = random(130, 256, dtype=torch.float16, seed=3)
    expected = reference_coded_product(x.float(), panels)
    assert (launched(x, panels) - expected).norm() < TOLERANCE[torch.float16] * expected.norm()


@pytest.mark.parametrize("num_rows, splits", [(20, 2), (64, 2), (130, None)])
@pytest.mark.parametrize("name", ["fp8 channels", "int8 channels", "groups of 128", "one group", "Q5_K"])
def test_products_with_a100_tiles(name: str, num_rows: int, splits: int | None) -> None:
    """Sums in place, and tiles of few rows with split inputs; for Q5_K only on older Triton."""
    # An odd number of panels.
    weight = random_weight(name, 64, 512)
    panels, _ = panels_and_order(weight)
    x = random(num_rows, 512, dtype=torch.float16, seed=3)
    expected = reference_coded_product(x.float(), panels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_matmul, "has_tile_copies", lambda device: False)
        patch.setattr(quantized_matmul, "spares_registers", lambda: False)
        got = launched(x, panels, splits=splits)
    assert (got - expected).norm() < TOLERANCE[torch.float16] * expected.norm()


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast:RuntimeWarning")  # of the first tile
def test_row_tiles_have_separate_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared counter would corrupt the first tile's result."""
    monkeypatch.setattr(quantized_matmul, "has_tile_copies", lambda device: False)
    panels, _ = panels_and_order(random_weight("groups of 128", 64, 512))
    x, counters = random(64, 512, dtype=torch.float16, seed=3), new_counters(64, DEVICE)
    counters[0] = 1
    expected = reference_coded_product(x.float(), panels)[32:]
    got = launch_coded_product(x, panels, counters, splits=2)[32:].double()
    assert (got - expected).norm() < TOLERANCE[torch.float16] * expected.norm()


@pytest.mark.parametrize("name", quick(FORMATS, _FEW))
def test_dequantized_numbers_are_rounded_once(name: str) -> None:
    panels, _ = panels_and_order(random_weight(name, *shape_of(name, 150, 416)))
    dtype = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
    numbers = launch_widen(panels, 64, 150, dtype)
    torch.testing.assert_close(
        numbers, numbers_of(panels)[64:].to(dtype), atol=1e-6, rtol=1e-6 if DEVICE.type == "cpu" else 8e-3
    )


def test_bias_residual_and_columns_of_a_wider_output() -> None:
    """Mixed GGUF files: queries and keys in one format, values in another."""
    weights = [random_weight(name, 70, 256) for name in ("Q4_K", "Q4_K", "Q6_K")]
    matrix = CodedMatrix.of(weights, DEVICE)
    assert matrix is not None and len(matrix.parts) == 2 and matrix.num_outputs == 210 and matrix.panels is None
    x, bias, residual = (random(*shape, dtype=torch.float16, seed=5) for shape in ((3, 256), (210,), (3, 210)))
    plain = TorchMatrix(torch.cat([numbers_of(part.panels) for part in matrix.parts]).half())
    torch.testing.assert_close(
        matrix.multiply(x, bias_O=bias, residual_TO=residual),
        plain.multiply(x, bias_O=bias, residual_TO=residual),
        atol=0.1,
        rtol=1e-2,
    )


class FP8Wins(MeasuredWays):
    def quickest(self, workload: str, ways: Ways) -> str:
        for compute in ways.values():
            # Every alternative must be computable.
            compute()
        return FP8


class FP8Fails(MeasuredWays):
    def quickest(self, workload: str, ways: Ways) -> str:
        raise RuntimeError("scaled_mm needs another device")


def test_prompts_are_multiplied_in_fp8_if_measured_and_asked_for(tmp_path: Path) -> None:
    """FP8 weights with one scale per output, and inputs with one scale per row, in a prompt of 512 rows."""
    weight = random_weight("fp8 channels", 48, 200)
    assert isinstance(weight, GroupedWeight)
    x, bias, residual = (random(*shape, seed=3).bfloat16() for shape in ((512, 200), (48,), (512, 48)))
    numbers, (codes, scales) = weight.rows(0, 48).to(DEVICE), reference_quantize_inputs(x, torch.float8_e4m3fn)
    products = {
        torch.float8_e4m3fn: (codes[:, :200].float() * scales[:, None]) @ numbers.T,
        None: x.float() @ numbers.T,
    }
    for activations, product in products.items():
        matrix = CodedMatrix.of([replace(weight, activations=activations)], DEVICE)
        assert matrix is not None
        matrix.measure(FP8Fails(tmp_path))
        unmeasured = matrix.multiply(x, bias_O=bias, residual_TO=residual)
        matrix.measure(FP8Wins(tmp_path))
        assert matrix.fp8_rows == 512 or activations is None
        got = matrix.multiply(x, bias_O=bias, residual_TO=residual)
        assert torch.equal(got, unmeasured) == (activations is None)
        if activations is not None or DEVICE.type == "cuda":
            torch.testing.assert_close(got.float(), product + bias + residual, atol=5e-2, rtol=1e-2)


@pytest.mark.parametrize(("num_tokens", "num_experts", "per_token"), [(1, 3, 2), (40, 2, 1)])
@pytest.mark.parametrize(
    ("name", "hidden", "features"),
    [
        ("fp8 channels", 80, 48),
        ("mxfp4", 96, 64),
        *quick([("fp8 blocks", 256, 128), ("nvfp4", 96, 64), ("nf4", 128, 64), ("Q6_K", 256, 256)], ()),
    ],
)
def test_coded_experts_equal_dequantized_experts(
    name: str, hidden: int, features: int, num_tokens: int, num_experts: int, per_token: int
) -> None:
    gate_up, down = (
        stacked([random_weight(name, outputs, inputs, seed=i) for i in range(num_experts)])
        for outputs, inputs in ((2 * features, hidden), (hidden, features))
    )
    scale = features**-0.5
    x = random(num_tokens, hidden, dtype=torch.float32, seed=3) * scale
    chosen = choices(num_tokens, num_experts, per_token)
    more: dict[str, Any] = {}
    if name == "mxfp4":  # gpt-oss
        more = {"activation": GatedActivation("swigluoai"), "biases": biases(num_experts, hidden, features)}
    elif name == "fp8 channels":
        more = {"input_weights_TC": random(num_tokens, per_token, seed=5)}
    expected = reference_coded_experts(x, gate_up, down, chosen, **more)
    got = launch_coded_experts(x, gate_up, down, chosen, **more)
    assert got.shape == expected.shape and (got - expected).norm() < 1e-4 * expected.norm()
    assert launch_coded_experts(x[:0], gate_up, down, chosen[:0]).shape == (0, per_token, hidden)


@pytest.mark.parametrize(
    ("gate_up_name", "down_name", "is_a100"),
    quick([("fp8 channels", "mxfp4", False), ("int4 in groups of 32", "groups of 128", True)], ()),
)
def test_both_expert_matrices_share_the_tiles(
    gate_up_name: str, down_name: str, is_a100: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second matrix needs smaller tiles than the first, and than the router has sorted."""
    if is_a100:
        monkeypatch.setattr(quantized_matmul, "has_tile_copies", lambda device: False)
    gate_up = stacked([random_weight(gate_up_name, 512, 64, seed=i) for i in range(2)])
    down = stacked([random_weight(down_name, 64, 256, seed=i) for i in range(2)])
    x, chosen = random(130, 64, seed=3) / 20, choices(130, 2, 1)
    expected = reference_coded_experts(x, gate_up, down, chosen)
    for tiles in (None, launch_sort_into_tiles(chosen, num_experts=2, rows=128)):
        got = launch_coded_experts(x, gate_up, down, chosen, tiles)
        assert (got - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="loads are counted in the interpreter only")
@pytest.mark.parametrize("name", quick(FORMATS, _FEW))
def test_bytes_read_are_close_to_bytes_stored(name: str) -> None:
    """Counts the loads of every program of a product: at most 1.1 times the file's bytes for any number of rows."""
    weight = random_weight(name, 128, 512)
    panels, _ = panels_and_order(weight)
    for num_rows in (1, 33) if name in ("Q4_K", "nvfp4") else (1,):
        x = random(num_rows, 512)
        with count_reads(*panels.tensors().values()) as counted:
            launched(x, panels)
        assert 0.95 * stored_bytes(name, weight) < counted.num_bytes <= 1.1 * stored_bytes(name, weight)


def stored_bytes(name: str, weight: QuantizedWeight) -> float:
    """Return the bytes in a file: GGUF blocks; or codes, scales, packed zeros and factors."""
    if isinstance(weight, GGMLWeight):
        return weight.blocks_OB.nbytes
    assert isinstance(weight, GroupedWeight)
    zero_bytes = {None: 0.0, "whole": 0.5 if GROUPED[name].codes is None else 1.0, "broken": 2.0}[GROUPED[name].zeros]
    factors = 0 if weight.factors_O is None else weight.factors_O.nbytes
    return weight.codes.nbytes + weight.scales_OG.nbytes + weight.scales_OG.numel() * zero_bytes + factors


def panels_and_order(weight: QuantizedWeight) -> tuple[CodePanels, Tensor | None]:
    rows = rows_of(weight, DEVICE)
    assert rows is not None
    return panels_of([rows]), rows.order_I


def stacked(weights: Sequence[QuantizedWeight]) -> CodePanels:
    panels = CodePanels.stack([panels_and_order(weight)[0] for weight in weights])
    assert panels is not None
    return panels


def launched(x: Tensor, panels: CodePanels, *, splits: int | None = None) -> Tensor:
    counters = new_counters(panels.shape[0], DEVICE)
    got = launch_coded_product(x, panels, counters, splits=splits)
    assert not counters.any(), "counters must be reset"
    return got.double()


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
