"""Writing quantized checkpoints, and measuring their quality."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from benchmarks.engine.kernels import bench_kernels
from core.types.errors import SpecError
from engine.quantization.write import fp8_parts, int8_parts, quantize_checkpoint
from engine.weights.open_checkpoint import open_checkpoint
from tests.engine.tiny_models import MakeModel


@pytest.mark.parametrize("shape", [(128, 256), (5, 7), (130, 300)])
def test_codes_are_within_half_a_step_of_the_weights(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    fp8 = fp8_parts(weight)
    numbers = (
        fp8["weight"].float()
        * fp8["weight_scale_inv"].repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    )
    if shape[0] % 128 == 0 and shape[1] % 128 == 0:
        theirs = Fp8Dequantize(None)._dequantize_one(fp8["weight"], fp8["weight_scale_inv"])
        torch.testing.assert_close(theirs.float(), numbers)
    # e4m3: half a step is 1/16 of the number, or 2^-10 of the scale near zero.
    bound = weight.abs() / 16 + weight.abs().max() / 448 * 2**-9
    assert ((numbers - weight).abs() <= bound).all()
    int8 = int8_parts(weight)
    assert ((int8["weight"] * int8["weight_scale"] - weight).abs() <= int8["weight_scale"] * 0.5001).all()
    assert int8["weight"].abs().amax(1).eq(127).all(), "codes must use the full range"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_written_checkpoint_reads_back(kind: str, family: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    directory, _ = tiny_model(family)
    quantize_checkpoint(directory, tmp_path / "q", kind)
    before, after = open_checkpoint(directory), open_checkpoint(tmp_path / "q")
    assert dict(after.shapes) == dict(before.shapes)
    quantised = [name for name in after.shapes if after.quantized(name) is not None]
    assert all(
        (".layers." in n and "norm" not in n and "gate.weight" not in n) == (n in quantised) for n in after.shapes
    )
    for name in after.shapes:
        exact, read = before.read(name), after.read(name)
        if name in quantised:
            assert 0 < (read - exact).abs().max() < exact.abs().max() / 15
        else:
            assert torch.equal(read, exact)
    stored = load_file(tmp_path / "q" / "model-00001.safetensors")
    assert {stored[name].itemsize for name in quantised} == {1}
    with pytest.raises(SpecError, match="already exists"):
        quantize_checkpoint(directory, tmp_path / "q", kind)
    with pytest.raises(SpecError, match="already quantized"):
        quantize_checkpoint(tmp_path / "q", tmp_path / "again", kind)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_measured_on_a_gpu_only() -> None:
    with pytest.raises(SpecError, match="no CUDA device"):
        bench_kernels()
