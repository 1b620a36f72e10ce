"""Low-bit CPU matrices: exact dequantization, accurate products and small memory on every instruction set."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cpu import library
from engine.cpu.library import Kernels, instruction_sets
from engine.cpu.structs import FormatName
from engine.kernels.gated_mul import SILU, GatedActivation
from engine.layers.codes import format_of
from engine.layers.layers import Before, RMSNorm
from engine.layers.packed_matrix import PackedMatrix
from engine.quantization.write import quantize_checkpoint
from engine.weights.quantized_weight import GGMLWeight, GroupedWeight, QuantizedWeight, pack_4_bits
from tests.engine import coded_weights
from tests.engine.steps import prompts, random, step
from tests.engine.tiny_models import MakeModel, MakeRunner

# T tokens, I input features, O output features

# Names of coded_weights.py, and the kernels' formats.
FORMATS = {name: FormatName[name] for name in coded_weights.OF_GGUF} | {
    "groups of 128": FormatName.INT4,
    "groups of 32": FormatName.INT4,
    "groups of 64, float32": FormatName.INT4_F32,
    "groups of 32, symmetric": FormatName.Q4_0,
    "int4 channels, float32": FormatName.INT4_F32,
    "unequal groups": FormatName.INT4,
    "nvfp4": FormatName.NVFP4,
    "mxfp4": FormatName.MXFP4,
    "nf4": FormatName.LEVELS,
    "fp4": FormatName.LEVELS,
    "int8 channels, float32": FormatName.INT8_F32,
    "int8 groups": FormatName.Q8_0,
    "fp8 blocks": FormatName.FP8,
    "fp8 channels": FormatName.FP8,
    "mxfp8": FormatName.MXFP8,
}
random_weight = partial(coded_weights.random_weight, has_every_float=True)
CPU = torch.device("cpu")
# Every tile size, one row more than fits, and blocks of rows.
ROW_COUNTS = (*range(1, 10), 14, 25, 96, 97, 100, 519)


def packed(kernels: Kernels, *weights: QuantizedWeight) -> PackedMatrix:
    matrix = PackedMatrix.few_bits(kernels, weights)
    assert matrix is not None
    return matrix


def as_kept(x_TI: Tensor, weight: QuantizedWeight) -> Tensor:
    """Quantize rows as the kernels do: 8 bits with one scale per run, 13 with levels; bf16 with 8-bit floats."""
    form = format_of(weight)
    assert form is not None
    if form.name in (FormatName.FP8, FormatName.MXFP8):
        return x_TI.double()
    if form.name is FormatName.LEVELS:
        return _rounded(x_TI, min(form.group, 64), most=4095)
    run = 16 if form.name in (FormatName.Q6_K, FormatName.NVFP4) else 32
    if (order_C := form.order_C) is not None:
        kept_TC = _rounded(F.pad(x_TI.float(), (0, 1))[:, order_C.long()], run)
        return kept_TC[:, order_C.argsort()[len(order_C) - x_TI.shape[1] :]]
    return _rounded(x_TI, run)


def _rounded(x_TI: Tensor, run: int, most: int = 127) -> Tensor:
    runs = x_TI.float().unflatten(1, (-1, run))
    scales = runs.abs().amax(-1, keepdim=True).clamp_min(1e-30) / most
    codes = (runs.double() * (1 / scales).double()).round()
    return (codes * scales).flatten(1)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_equal_the_stored_numbers(kernels: Kernels, name: str) -> None:
    """Two matrices fused into one whose rows do not fill a panel."""
    first, second = random_weight(name, 21, 768), random_weight(name, 19, 768)
    form = format_of(first)
    assert form is not None and form.name is FORMATS[name]
    wanted = torch.cat((first.rows(0, 21), second.rows(0, 19)))
    rows = torch.tensor([39, 0, 21, 20, *range(40)])
    got = packed(kernels, first, second).rows(rows)
    torch.testing.assert_close(got.float(), wanted[rows], rtol=2**-8, atol=1e-6)
    assert wanted.std() > 0


@pytest.mark.parametrize(
    ("dtype", "zero"), [(torch.int8, -9), (torch.int8, 100), (torch.uint8, 120), (torch.uint8, 200)]
)
def test_zeros_of_signed_codes_in_every_dtype(kernels: Kernels, dtype: torch.dtype, zero: int) -> None:
    """Zeros as the reader stores them. Their unsigned codes, 128 more, fit neither dtype; those above 255 no kernel."""
    codes = torch.randint(-128, 128, (16, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    zeros = torch.full((16, 2), zero, dtype=dtype)
    weight = GroupedWeight(codes, random(16, 2).abs() + 0.1, zeros, torch.arange(64) // 32)
    assert (format_of(weight) is None) == (zero + 128 > 255)
    if (matrix := PackedMatrix.few_bits(kernels, (weight,))) is not None:
        torch.testing.assert_close(matrix.rows(torch.arange(16)).float(), weight.rows(0, 16), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_products_equal_those_of_the_stored_numbers(kernels: Kernels, name: str) -> None:
    """Exact except for rounding the rows, the result to bf16, and NF4's levels to 14 bits."""
    weight, x_TI = random_weight(name, 50, 768), random(20, 768, seed=1).bfloat16()
    numbers_OI = weight.rows(0, 50).double()
    wanted = as_kept(x_TI, weight) @ numbers_OI.T
    got = packed(kernels, weight).multiply(x_TI)
    # Sum of the magnitudes that are added.
    size = x_TI.double().abs() @ numbers_OI.abs().T
    assert bool(((got - wanted).abs() <= wanted.abs() * 2**-8 + size * (6e-5 if name == "nf4" else 1e-5)).all())


@pytest.mark.parametrize("name", FORMATS)
def test_row_does_not_depend_on_other_rows(kernels: Kernels, name: str) -> None:
    matrix, x_TI = packed(kernels, random_weight(name, 250, 768)), random(530, 768, seed=1).bfloat16()
    whole = matrix.multiply(x_TI)
    for count in ROW_COUNTS:
        torch.testing.assert_close(matrix.multiply(x_TI[9 : 9 + count]), whole[9 : 9 + count], atol=0, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_inf_propagate(kernels: Kernels, name: str, num_rows: int) -> None:
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
    befores: list[tuple[Before, int]] = [(RMSNorm(random(96, seed=4).bfloat16(), 1e-5), 96), (SILU, 192)]
    for before, width in befores:
        x_TI = random(5, width, seed=1).bfloat16()
        got = matrix.multiply(x_TI, bias_O=bias_O, before=before, residual_TO=residual_TO)
        wanted = plain.multiply(x_TI, bias_O=bias_O, before=before, residual_TO=residual_TO)
        assert (got - wanted).abs().mean() < 0.02 * (wanted - residual_TO).abs().mean()


@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_close_to_file_size(kernels: Kernels, name: str) -> None:
    weight = random_weight(name, 64, 1024)
    if isinstance(weight, GGMLWeight):
        stored = weight.blocks_OB.nbytes
    else:
        assert isinstance(weight, GroupedWeight)
        stored = weight.codes.nbytes + weight.scales_OG.nbytes
        stored += 0 if weight.zeros_OG is None else weight.zeros_OG.numel() // 2
    # Unequal groups are padded to whole runs.
    assert packed(kernels, weight).num_bytes <= (1.6 if name == "unequal groups" else 1.1) * stored


@pytest.mark.parametrize("num_inputs", [16, 48, 80, 200])
@pytest.mark.parametrize("name", ["int8 channels, float32", "fp8 channels", "int4 channels, float32"])
def test_inputs_that_do_not_fill_a_run_are_padded(kernels: Kernels, name: str, num_inputs: int) -> None:
    weight, x_TI = random_weight(name, 21, num_inputs), random(11, num_inputs, seed=1).bfloat16()
    matrix, numbers_OI = packed(kernels, weight), weight.rows(0, 21)
    torch.testing.assert_close(matrix.rows(torch.arange(21)).float(), numbers_OI, rtol=2**-8, atol=1e-6)
    wanted = as_kept(x_TI, weight) @ numbers_OI.double().T
    size = x_TI.double().abs() @ numbers_OI.double().abs().T
    got = matrix.multiply(x_TI)
    assert bool(((got - wanted).abs() <= wanted.abs() * 2**-8 + size * 1e-5).all())
    assert torch.equal(matrix.multiply(x_TI[3:5]), got[3:5])
    torch.testing.assert_close(matrix.multiply_by_torch(x_TI), got, rtol=0.05, atol=0.02 * float(size.max()))


@pytest.mark.parametrize(
    "names",
    [("Q4_K", "Q4_K", "Q6_K", "Q5_K"), ("nvfp4", "nvfp4", "unequal groups", "nf4")],
    ids=["GGUF", "factors and orders"],
)
def test_parts_of_different_formats(kernels: Kernels, names: tuple[str, ...]) -> None:
    """Mixed GGUF files: queries and keys in one format, values in another; each with bias and residual. NVFP4 keeps one
    factor per part of a fused matrix; parts of GPTQ files may have orders of their own."""
    weights = [random_weight(name, 20, 256) for name in names]
    if isinstance(weights[1], GroupedWeight):
        assert weights[1].factors_O is not None
        weights[1] = replace(weights[1], factors_O=weights[1].factors_O * 3)
    x_TI, bias_O, residual_TO = (random(*shape, seed=1).bfloat16() for shape in ((9, 256), (80,), (9, 80)))
    whole = packed(kernels, *weights)
    got = whole.multiply(x_TI, bias_O=bias_O, residual_TO=residual_TO)
    by_torch = whole.multiply_by_torch(x_TI, bias_O=bias_O, residual_TO=residual_TO)
    for i, weight in enumerate(weights):
        own = slice(20 * i, 20 * i + 20)
        bias, residual = bias_O[own].contiguous(), residual_TO[:, own].contiguous()
        alone = packed(kernels, weight).multiply(x_TI, bias_O=bias, residual_TO=residual)
        assert torch.equal(got[:, own], alone)
        wanted = x_TI.double() @ weight.rows(0, 20).double().T + bias + residual
        for product in (got, by_torch):
            torch.testing.assert_close(product[:, own].double(), wanted, rtol=0.05, atol=0.05 * float(wanted.std()))


@pytest.mark.parametrize("before", [RMSNorm(random(256, seed=4).bfloat16(), 1e-5), SILU], ids=["norm", "gated"])
def test_operation_before_a_permuted_matrix(kernels: Kernels, before: Before) -> None:
    """The norm and the gate see features in the model's order."""
    weight = random_weight("unequal groups", 40, 256)
    x_TI = random(5, 512 if isinstance(before, GatedActivation) else 256, seed=1).bfloat16()
    matrix = packed(kernels, weight)
    assert torch.equal(matrix.multiply(x_TI, before=before), matrix.multiply(before(x_TI).contiguous()))


def test_unsupported_weights_are_rejected() -> None:
    """Weights with NaN and zeros between codes have no format."""
    codes, group_I = torch.zeros(4, 64, dtype=torch.uint8), torch.arange(64) // 32
    scales, zeros = torch.full((4, 2), 0.1), torch.ones(4, 2)
    assert format_of(GroupedWeight(pack_4_bits(codes), scales, zeros, group_I)) is not None
    assert format_of(GroupedWeight(pack_4_bits(codes), scales, zeros + 0.5, group_I)) is None
    nan = torch.full((4, 64), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert format_of(GroupedWeight(nan, scales, None, group_I)) is None


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("kind", ["fp8", "fp8_dynamic", "int8", "int4", "int4_asym", "nvfp4", "mxfp4"])
def test_written_checkpoints_stay_in_their_bits(
    kind: str,
    family: str,
    tiny_model: MakeModel,
    make_runner: MakeRunner,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No matrix of the layers or experts is widened, and logits are close to those of the widened model."""
    # All experts are chosen, because rounding may choose others.
    every = {"num_local_experts": 4, "num_experts_per_tok": 4} if family == "mixtral" else {}
    directory, _ = tiny_model(family, hidden_size=64, intermediate_size=96, head_dim=16, **every)
    group = 32 if kind.startswith("int4") else None
    quantize_checkpoint(directory, tmp_path / kind, kind, group=group)
    (tokens,) = prompts(30)
    stored, wide = (
        step(make_runner(tmp_path / kind, dtype="bfloat16", weights=weights), [tokens], [(0, 0, 30)])[0].float()
        for weights in ("auto", "widen")
    )
    assert "are held in" not in caplog.text
    # The weights of experts amplify rounding; another expert's matrix would change the logits by their own size.
    assert (stored - wide).norm() < (0.6 if family == "mixtral" else 0.12) * wide.norm()
    assert not torch.equal(stored, wide) or kind in ("fp8", "fp8_dynamic")


# Instruction sets that a processor needs to run the build for each target; None: no test machine has them.
_NEEDED: dict[str, set[str] | None] = {
    "x86-64": set(),
    "haswell": {"avx2"},
    "skylake-avx512": {"avx512f"},
    "icelake-server": {"avx512_vnni"},
    "alderlake": None,
    "cooperlake": {"avx512_vnni", "avx512_bf16"},
    "sapphirerapids": None,
}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("target", _NEEDED)
def test_every_instruction_set_gives_the_same_results(target: str, kernels: Kernels, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    assert compiler is not None
    source, built = Path(library.__file__).parent / "kernels.cpp", tmp_path / "kernels.so"
    flags = [*(flag for flag in library.FLAGS if not flag.startswith("-march")), f"-march={target}"]
    command = [compiler, *flags, "-O1", str(source), "-o", str(built)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    needed = _NEEDED[target]
    if needed is None or not needed <= set(instruction_sets()):
        return
    other = Kernels(built)
    for name in FORMATS:
        weight, x_TI = random_weight(name, 40, 512), random(13, 512, seed=1).bfloat16()
        ours, theirs = (packed(each, weight) for each in (kernels, other))
        here, there = ours.multiply(x_TI).float(), theirs.multiply(x_TI).float()
        # A tie in a row's code may round the other way.
        assert (here - there).abs().mean() < 1e-3 * here.abs().mean(), name
        assert torch.equal(ours.rows(torch.arange(40)), theirs.rows(torch.arange(40))), name
