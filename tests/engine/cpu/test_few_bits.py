"""Low-bit CPU matrices: exact dequantization, accurate products and small memory on every instruction set."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from core.model.gguf_import import import_gguf
from engine.cpu import library
from engine.cpu.library import Kernels
from engine.layers.codes import format_of
from engine.layers.layers import Before, GatedSiLU, RMSNorm
from engine.layers.packed_matrix import PackedMatrix
from engine.weights.quantized_weight import GGMLWeight, GroupedWeight, QuantizedWeight
from tests.engine.cpu.coded_weights import FORMATS, random_weight
from tests.engine.gguf_files import write_model
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import MakeRunner, random_model, reference_logits, tiny_config

# T tokens, I input features, O output features

CPU = torch.device("cpu")
# Every tile size, one row more than fits, and blocks of rows.
ROW_COUNTS = (*range(1, 10), 14, 97, 100)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(kernels: Kernels, *weights: QuantizedWeight) -> PackedMatrix:
    matrix = PackedMatrix.few_bits(kernels, weights)
    assert matrix is not None
    return matrix


def as_kept(x_TI: Tensor, run: int) -> Tensor:
    """Quantize rows as the kernels do: 8 bits with one scale per run."""
    runs = x_TI.float().unflatten(1, (-1, run))
    scales = runs.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    codes = (runs.double() * (1 / scales).double()).round()
    return (codes * scales).flatten(1)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_equal_the_stored_numbers(kernels: Kernels, name: str | int) -> None:
    """Two matrices fused into one whose rows do not fill a panel."""
    first, second = random_weight(name, 21, 768), random_weight(name, 19, 768)
    wanted = torch.cat((first.rows(0, 21), second.rows(0, 19)))
    rows = torch.tensor([39, 0, 21, 20, *range(40)])
    got = packed(kernels, first, second).rows(rows)
    torch.testing.assert_close(got.float(), wanted[rows], rtol=2**-8, atol=1e-6)
    assert wanted.std() > 0


@pytest.mark.parametrize("name", FORMATS)
def test_products_equal_those_of_the_stored_numbers(kernels: Kernels, name: str | int) -> None:
    """Exact except for rounding the rows, and the result to bf16."""
    weight, x_TI = random_weight(name, 50, 768), random(7, 768, seed=1).bfloat16()
    numbers_OI = weight.rows(0, 50).double()
    wanted = as_kept(x_TI, 16 if name == "Q6_K" else 32) @ numbers_OI.T
    got = packed(kernels, weight).multiply(x_TI)
    # Sum of the magnitudes that are added.
    size = x_TI.double().abs() @ numbers_OI.abs().T
    assert bool(((got - wanted).abs() <= wanted.abs() * 2**-8 + size * 1e-5).all())


def test_parts_of_different_formats(kernels: Kernels) -> None:
    """Mixed GGUF files: queries and keys in one format, values in another; each with bias and residual."""
    weights = [random_weight(name, 20, 256) for name in ("Q4_K", "Q4_K", "Q6_K", "Q5_K")]
    x_TI, bias_O, residual_TO = (random(*shape, seed=1).bfloat16() for shape in ((9, 256), (80,), (9, 80)))
    whole = packed(kernels, *weights).multiply(x_TI, bias_O=bias_O, residual_TO=residual_TO)
    for i, weight in enumerate(weights):
        own = slice(20 * i, 20 * i + 20)
        bias, residual = bias_O[own].contiguous(), residual_TO[:, own].contiguous()
        alone = packed(kernels, weight).multiply(x_TI, bias_O=bias, residual_TO=residual)
        assert torch.equal(whole[:, own], alone)


def test_torch_multiplies_dequantized_weights(kernels: Kernels) -> None:
    weights = [random_weight(name, 300, 256) for name in ("Q4_K", "Q6_K")]
    x_TI, bias_O = random(9, 256, seed=1).bfloat16(), random(600, seed=2).bfloat16()
    got = packed(kernels, *weights).multiply_by_torch(x_TI, bias_O=bias_O)
    numbers_OI = torch.cat([weight.rows(0, 300) for weight in weights])
    size = x_TI.double().abs() @ numbers_OI.double().abs().T
    wanted = x_TI.double() @ numbers_OI.double().T + bias_O.double()
    assert bool(((got - wanted).abs() <= wanted.abs() * 2**-8 + size * 2**-9).all())


@pytest.mark.parametrize("name", FORMATS)
def test_row_does_not_depend_on_other_rows(kernels: Kernels, name: str | int) -> None:
    matrix, x_TI = packed(kernels, random_weight(name, 40, 512)), random(120, 512, seed=1).bfloat16()
    whole = matrix.multiply(x_TI)
    for count in ROW_COUNTS:
        torch.testing.assert_close(matrix.multiply(x_TI[9 : 9 + count]), whole[9 : 9 + count], atol=0, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_inf_propagate(kernels: Kernels, name: str | int, num_rows: int) -> None:
    """Otherwise invalid logits would go unnoticed."""
    matrix, x_TI = packed(kernels, random_weight(name, 40, 512)), random(num_rows, 512, seed=1).bfloat16()
    whole = matrix.multiply(x_TI)
    for value in (float("nan"), float("inf")):
        x_TI[-1, 300] = value
        got = matrix.multiply(x_TI)
        assert not got[-1].isfinite().any()
        assert torch.equal(got[:-1], whole[:-1])


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_fused_operations_equal_those_of_bf16(kernels: Kernels, name: str) -> None:
    """Norm, SiLU, bias and residual equal those of a bf16 matrix with the same numbers."""
    weight = random_weight(name, 40, 96)
    matrix, plain = packed(kernels, weight), PackedMatrix.bf16(kernels, weight.rows(0, 40))
    bias_O, residual_TO = random(40, seed=2).bfloat16(), random(5, 40, seed=3).bfloat16()
    befores: list[tuple[Before, int]] = [(RMSNorm(random(96, seed=4).bfloat16(), 1e-5), 96), (GatedSiLU(), 192)]
    for before, width in befores:
        x_TI = random(5, width, seed=1).bfloat16()
        got = matrix.multiply(x_TI, bias_O=bias_O, before=before, residual_TO=residual_TO)
        wanted = plain.multiply(x_TI, bias_O=bias_O, before=before, residual_TO=residual_TO)
        assert (got - wanted).abs().mean() < 0.02 * (wanted - residual_TO).abs().mean()


@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_close_to_file_size(kernels: Kernels, name: str | int) -> None:
    weight = random_weight(name, 64, 1024)
    if isinstance(weight, GGMLWeight):
        stored = weight.blocks_OB.nbytes
    else:
        assert isinstance(name, int)
        # Codes, 16-bit scales and 4-bit zeros.
        stored = 64 * 1024 // 2 + 64 * 1024 // name * 5 // 2
    assert packed(kernels, weight).num_bytes <= 1.1 * stored


def test_unsupported_weights_are_rejected() -> None:
    """Scales beyond half precision and groups in another order are dequantized per product instead."""
    codes, group_I = torch.zeros(4, 64, dtype=torch.uint8), torch.arange(64) // 32
    scales, zeros = torch.full((4, 2), 0.1), torch.ones(4, 2)
    exact = scales.half().float()
    assert format_of(GroupedWeight.of_4_bits(codes, exact, zeros, group_I)) is not None
    assert format_of(GroupedWeight.of_4_bits(codes, scales, zeros, group_I)) is None
    assert format_of(GroupedWeight.of_4_bits(codes, exact, zeros, torch.arange(64) % 2)) is None
    assert format_of(GroupedWeight(torch.zeros(4, 64, dtype=torch.int8), exact, None, group_I)) is None


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_logit_error_is_below_quantization_error(name: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    """Logits are closer to those of the dequantized model than the latter are to the unquantized one."""
    model = random_model(tiny_config("llama", hidden_size=64, intermediate_size=96, head_dim=16))
    (tokens,) = prompts(30)
    exact = reference_logits(model, tokens)[-1]
    write_model(tmp_path / "m.gguf", model, quantized=GGMLQuantizationType[name])
    import_gguf(tmp_path / "m.gguf", tmp_path)
    widened = reference_logits(model, tokens)[-1]
    logits = step(make_runner(tmp_path, dtype="bfloat16"), [tokens], [(0, 0, 30)])[0]
    plain = step(make_runner(tmp_path, dtype="bfloat16"), [tokens], [(0, 0, 30)])[0]
    of_the_format, of_bf16 = ((other - widened).norm() for other in (exact, plain))
    assert (logits - widened).norm() < of_the_format + of_bf16


@pytest.mark.slow
@pytest.mark.parametrize("target", ["x86-64", "skylake-avx512", "icelake-server", "alderlake", "sapphirerapids"])
def test_every_instruction_set_compiles(target: str, kernels: Kernels, tmp_path: Path) -> None:
    """The portable build, which every processor can run, gives the same results as the native one."""
    compiler = shutil.which("c++")
    assert compiler is not None
    source, built = Path(library.__file__).parent / "kernels.cpp", tmp_path / "kernels.so"
    flags = [*(flag for flag in library.FLAGS if not flag.startswith("-march")), f"-march={target}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(built)], check=True, capture_output=True, timeout=300)
    if target != "x86-64":
        return
    portable = Kernels(built)
    for name in FORMATS:
        weight, x_TI = random_weight(name, 40, 512), random(13, 512, seed=1).bfloat16()
        ours, theirs = (packed(each, weight) for each in (kernels, portable))
        here, there = ours.multiply(x_TI).float(), theirs.multiply(x_TI).float()
        # A tie in a row's code may round the other way.
        assert (here - there).abs().mean() < 1e-3 * here.abs().mean()
        assert torch.equal(ours.rows(torch.arange(40)), theirs.rows(torch.arange(40)))
