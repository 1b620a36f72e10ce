"""Low-bit products equal those of the dequantized weights; each stored byte is read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.model.gguf_table import GGML_TYPES
from engine.cpu.autotune import FP8, MeasuredWays, Ways
from engine.kernels.gated_mul import GatedActivation
from engine.kernels.moe.expert_tiles import launch_sort_into_tiles
from engine.kernels.moe.fused_experts import launch_coded_experts
from engine.kernels.quant import quantized_matmul
from engine.kernels.quant.code_panels import CodePanels
from engine.kernels.quant.quantized_matmul import (
    launch_coded_product,
    launch_widen,
    new_counters,
)
from engine.layers.code_parts import panels_of, rows_of
from engine.layers.layers import TorchMatrix
from engine.layers.low_bit_matrix import CodedMatrix
from engine.weights.quantized_weight import E2M1_LEVELS, GGMLWeight, GroupedWeight, QuantizedWeight
from tests.engine.kernels.moe.test_fused_experts import biases, choices
from tests.engine.kernels.pools import DEVICE, DTYPES, random
from tests.engine.kernels.read_bytes import count_reads
from tests.support.grids import quick
from tests.support.product_references import (
    numbers_of,
    reference_coded_experts,
    reference_coded_product,
    reference_quantize_inputs,
)

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

OF_GGUF = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
# Offsets of the half-precision scales in a block.
HALVES_AT = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
HALVES_AT |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
# Numbers of NF4, Dettmers et al. 2023, arXiv:2305.14314, appendix E.
NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)


@dataclass(frozen=True)
class Grouped:
    """Format of a GroupedWeight. size: inputs per group; None: all. zeros: None, "whole" or "broken" numbers."""

    codes: torch.dtype | None
    size: int | None
    scales: torch.dtype = torch.float32
    zeros: str | None = None
    levels: tuple[float, ...] | None = None
    has_factors: bool = False
    in_order: bool = True


GROUPED = {
    "fp8 channels": Grouped(torch.float8_e4m3fn, None),
    "fp8 blocks": Grouped(torch.float8_e4m3fn, 128),
    "fp8 blocks of powers": Grouped(torch.float8_e4m3fn, 128, torch.float8_e8m0fnu),
    "mxfp8": Grouped(torch.float8_e4m3fn, 32, torch.float8_e8m0fnu),
    "int8 channels": Grouped(torch.int8, None, torch.bfloat16),
    "int8 groups": Grouped(torch.int8, 32, torch.float16),
    "int8 with zeros": Grouped(torch.uint8, 64, torch.bfloat16, zeros="whole"),
    "int8 channels with zeros": Grouped(torch.int8, None, torch.float16, zeros="whole"),
    "nvfp4": Grouped(None, 16, torch.float8_e4m3fn, levels=E2M1_LEVELS, has_factors=True),
    "mxfp4": Grouped(None, 32, torch.float8_e8m0fnu, levels=E2M1_LEVELS),
    "nf4": Grouped(None, 64, levels=NF4),
    "int4 channels": Grouped(None, None, torch.bfloat16),
    "int4 in groups of 32": Grouped(None, 32, torch.bfloat16),
    "groups of 16": Grouped(None, 16, torch.float16, zeros="whole"),
    "groups of 64": Grouped(None, 64, torch.bfloat16, zeros="whole"),
    "groups of 128": Grouped(None, 128, torch.float16, zeros="whole"),
    "groups of 256": Grouped(None, 256, torch.float16, zeros="whole"),
    "one group": Grouped(None, None, torch.float16, zeros="whole"),
    "broken zeros": Grouped(None, 128, torch.float16, zeros="broken"),
    "groups in any order": Grouped(None, 32, torch.float16, zeros="whole", in_order=False),
    "nf4 in any order": Grouped(None, 32, levels=NF4, in_order=False),
}
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


def random_weight(name: str, num_outputs: int, num_inputs: int, *, seed: int = 0) -> QuantizedWeight:
    """Return a matrix with uniformly random codes, so that every bit matters; numbers of about one."""
    generator = torch.Generator().manual_seed(seed)
    if name in OF_GGUF:
        kind = next(kind for kind in GGML_TYPES.values() if kind.name == name)
        blocks = torch.randint(0, 256, (num_outputs, num_inputs // kind.block, kind.num_bytes), generator=generator)
        blocks = blocks.to(torch.uint8)
        for at in HALVES_AT[name]:
            halves = (torch.rand(blocks.shape[:2], generator=generator) / 50).half()
            blocks[..., at : at + 2] = halves.unsqueeze(-1).view(torch.uint8)
        return GGMLWeight(blocks.flatten(1), kind)
    form = GROUPED[name]
    group_I = torch.arange(num_inputs) // (form.size or num_inputs)
    num_groups = int(group_I[-1]) + 1
    scales = torch.rand(num_outputs, num_groups, generator=generator) / 8 + 0.0625
    scales = scales.to(form.scales)
    if not form.in_order:
        group_I = group_I[torch.randperm(num_inputs, generator=generator)]
    factors = torch.rand(num_outputs, generator=generator) + 0.5 if form.has_factors else None
    if form.codes == torch.float8_e4m3fn:
        codes = torch.randn(num_outputs, num_inputs, generator=generator)
        return GroupedWeight(codes.to(form.codes), scales, None, group_I)
    bits, least = 4 if form.codes is None else 8, -128 if form.codes == torch.int8 else 0
    codes = torch.randint(least, least + (1 << bits), (num_outputs, num_inputs), generator=generator)
    zeros = torch.randint(least, least + (1 << bits) + 1, scales.shape, generator=generator).float()
    if form.zeros is None:
        zeros.fill_(least + (1 << bits - 1))
    elif form.zeros == "broken":
        zeros += 0.25
    if form.codes is not None:
        return GroupedWeight(codes.to(form.codes), scales, None if not form.zeros and least else zeros, group_I)
    levels = None if form.levels is None else torch.tensor(form.levels)
    return GroupedWeight.of_4_bits(
        codes, scales, zeros if levels is None else None, group_I, levels=levels, factors_O=factors
    )


def shape_of(name: str, num_outputs: int, num_inputs: int) -> tuple[int, int]:
    return num_outputs, num_inputs if not name.endswith("_K") else -(-num_inputs // 256) * 256


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
