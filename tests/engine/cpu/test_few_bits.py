"""Matrices that stay in few bits: the same numbers, the same products, little memory; whatever the instruction set."""

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
ROW_COUNTS = (*range(1, 10), 14, 97, 100)  # every tile, and one row more than fit into one; in blocks of rows


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(kernels: Kernels, *weights: QuantizedWeight) -> PackedMatrix:
    matrix = PackedMatrix.few_bits(kernels, weights)
    assert matrix is not None
    return matrix


def as_kept(x_TI: Tensor, run: int) -> Tensor:
    """Rows as the kernels quantise them: 8 bits, and a scale for each run."""
    runs = x_TI.float().unflatten(1, (-1, run))
    scales = runs.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    codes = (runs.double() * (1 / scales).double()).round()
    return (codes * scales).flatten(1)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_numbers_that_are_stored(kernels: Kernels, name: str | int) -> None:
    """Two matrices as one, whose rows fill no panel."""
    first, second = random_weight(name, 21, 768), random_weight(name, 19, 768)
    wanted = torch.cat((first.rows(0, 21), second.rows(0, 19)))
    rows = torch.tensor([39, 0, 21, 20, *range(40)])
    got = packed(kernels, first, second).rows(rows)
    torch.testing.assert_close(got.float(), wanted[rows], rtol=2**-8, atol=1e-6)
    assert wanted.std() > 0


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_numbers(kernels: Kernels, name: str | int) -> None:
    """But for rounding the rows, and the result to bf16."""
    weight, x_TI = random_weight(name, 50, 768), random(7, 768, seed=1).bfloat16()
    numbers_OI = weight.rows(0, 50).double()
    wanted = as_kept(x_TI, 16 if name == "Q6_K" else 32) @ numbers_OI.T
    got = packed(kernels, weight).multiply(x_TI)
    size = x_TI.double().abs() @ numbers_OI.abs().T  # of what is added up
    assert bool(((got - wanted).abs() <= wanted.abs() * 2**-8 + size * 1e-5).all())


def test_parts_of_unlike_formats(kernels: Kernels) -> None:
    """As in GGUF's mixtures: queries and keys in one format, values in another; bias and residual go with each."""
    weights = [random_weight(name, 20, 256) for name in ("Q4_K", "Q4_K", "Q6_K", "Q5_K")]
    x_TI, bias_O, residual_TO = (random(*shape, seed=1).bfloat16() for shape in ((9, 256), (80,), (9, 80)))
    whole = packed(kernels, *weights).multiply(x_TI, bias_O=bias_O, residual_TO=residual_TO)
    for i, weight in enumerate(weights):
        own = slice(20 * i, 20 * i + 20)
        bias, residual = bias_O[own].contiguous(), residual_TO[:, own].contiguous()
        alone = packed(kernels, weight).multiply(x_TI, bias_O=bias, residual_TO=residual)
        assert torch.equal(whole[:, own], alone)


def test_torch_multiplies_what_is_widened(kernels: Kernels) -> None:
    weights = [random_weight(name, 300, 256) for name in ("Q4_K", "Q6_K")]
    x_TI, bias_O = random(9, 256, seed=1).bfloat16(), random(600, seed=2).bfloat16()
    got = packed(kernels, *weights).multiply_by_torch(x_TI, bias_O=bias_O)
    numbers_OI = torch.cat([weight.rows(0, 300) for weight in weights])
    size = x_TI.double().abs() @ numbers_OI.double().abs().T
    wanted = x_TI.double() @ numbers_OI.double().T + bias_O.double()
    assert bool(((got - wanted).abs() <= wanted.abs() * 2**-8 + size * 2**-9).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours(kernels: Kernels, name: str | int) -> None:
    matrix, x_TI = packed(kernels, random_weight(name, 40, 512)), random(120, 512, seed=1).bfloat16()
    whole = matrix.multiply(x_TI)
    for count in ROW_COUNTS:
        torch.testing.assert_close(matrix.multiply(x_TI[9 : 9 + count]), whole[9 : 9 + count], atol=0, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_number_stays_none(kernels: Kernels, name: str | int, num_rows: int) -> None:
    """Else nobody would hear that an answer's logits are none."""
    matrix, x_TI = packed(kernels, random_weight(name, 40, 512)), random(num_rows, 512, seed=1).bfloat16()
    whole = matrix.multiply(x_TI)
    for value in (float("nan"), float("inf")):
        x_TI[-1, 300] = value
        got = matrix.multiply(x_TI)
        assert not got[-1].isfinite().any()
        assert torch.equal(got[:-1], whole[:-1])


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_what_happens_before_and_after(kernels: Kernels, name: str) -> None:
    """A norm, SiLU, a bias and a residual are those of a bf16 matrix with the same numbers."""
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
def test_memory_is_hardly_more_than_the_file_has(kernels: Kernels, name: str | int) -> None:
    weight = random_weight(name, 64, 1024)
    if isinstance(weight, GGMLWeight):
        stored = weight.blocks_OB.nbytes
    else:
        assert isinstance(name, int)
        stored = 64 * 1024 // 2 + 64 * 1024 // name * 5 // 2  # codes; scales of 16 bits, zeros of 4
    assert packed(kernels, weight).num_bytes <= 1.1 * stored


def test_what_the_kernels_cannot_hold() -> None:
    """Scales beyond half precision, groups in another order: they are widened as they are used."""
    codes, group_I = torch.zeros(4, 64, dtype=torch.uint8), torch.arange(64) // 32
    scales, zeros = torch.full((4, 2), 0.1), torch.ones(4, 2)
    exact = scales.half().float()
    assert format_of(GroupedWeight.of_4_bits(codes, exact, zeros, group_I)) is not None
    assert format_of(GroupedWeight.of_4_bits(codes, scales, zeros, group_I)) is None
    assert format_of(GroupedWeight.of_4_bits(codes, exact, zeros, torch.arange(64) % 2)) is None
    assert format_of(GroupedWeight(torch.zeros(4, 64, dtype=torch.int8), exact, None, group_I)) is None


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_logits_are_within_the_formats_own_rounding(name: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    """Of the same numbers widened: nearer to them than they are to the model before it was quantised."""
    model = random_model(tiny_config("llama", hidden_size=64, intermediate_size=96, head_dim=16))
    (tokens,) = prompts(30)
    exact = reference_logits(model, tokens)[-1]
    write_model(tmp_path / "m.gguf", model, quantized=GGMLQuantizationType[name])
    import_gguf(tmp_path / "m.gguf", tmp_path)
    widened = reference_logits(model, tokens)[-1]
    logits = step(make_runner(tmp_path, dtype="bfloat16", weights="quantized"), [tokens], [(0, 0, 30)])[0]
    plain = step(make_runner(tmp_path, dtype="bfloat16"), [tokens], [(0, 0, 30)])[0]
    of_the_format, of_bf16 = ((other - widened).norm() for other in (exact, plain))
    assert (logits - widened).norm() < of_the_format + of_bf16


@pytest.mark.slow
@pytest.mark.parametrize("target", ["x86-64", "skylake-avx512", "icelake-server", "alderlake", "sapphirerapids"])
def test_every_instruction_set(target: str, kernels: Kernels, tmp_path: Path) -> None:
    """All of them compile; the portable one, which every processor here can run, gives what this one's gives."""
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
        assert (here - there).abs().mean() < 1e-3 * here.abs().mean()  # a tie of a row's code may go the other way
        assert torch.equal(ours.rows(torch.arange(40)), theirs.rows(torch.arange(40)))
