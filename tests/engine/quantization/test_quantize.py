"""Writing quantized checkpoints, and measuring their quality."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from benchmarks.engine.kernels import bench_kernels
from core.types.errors import SpecError
from engine.quantization import write
from engine.quantization.formats import FORMATS, round_matrix
from engine.quantization.write import quantize_checkpoint
from engine.weights.open_checkpoint import open_checkpoint
from engine.weights.quantized_weight import E2M1_LEVELS
from tests.engine.tiny_models import MakeModel

# Tiny models whose inputs every group divides.
SIZES = {"hidden_size": 64, "intermediate_size": 128}
GROUPS = {"fp8": None, "fp8_dynamic": None, "int8": None, "int4": 32, "int4_asym": 32, "nvfp4": None, "mxfp4": None}
# Settings of the weights in compressed-tensors' presets FP8_DYNAMIC, W8A8, W4A16, W4A16_ASYM, NVFP4A16 and MXFP4A16.
PRESETS = {
    "fp8_dynamic": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
    "int4_asym": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": False},
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
}


def unpacked(packed: Tensor) -> Tensor:
    """Return the 4-bit codes of bytes or words, first in the low end."""
    words = packed.numpy().astype("int64")
    return torch.from_numpy(np.stack([words >> 4 * i & 15 for i in range(2 * packed.itemsize)], -1)).flatten(1)


def read_matrix(tensors: dict[str, Tensor], stem: str) -> Tensor:
    """Dequantize a matrix by the definition of its format."""
    parts = {name.removeprefix(f"{stem}."): part for name, part in tensors.items() if name.startswith(f"{stem}.")}
    scales = parts.get("weight_scale", parts.get("weight_scale_inv"))
    if "weight_shape" in parts:
        shape = parts["weight_shape"].tolist()
        numbers, scales = unpacked(parts["weight_packed"])[:, : shape[1]].float(), scales.float()
        zeros = torch.tensor(8.0)
        if "weight_zero_point" in parts:
            zeros = (
                unpacked(parts["weight_zero_point"].T.contiguous())
                .T[: shape[0]]
                .repeat_interleave(shape[1] // scales.shape[1], 1)
            )
        numbers = numbers - zeros
    elif "weight_packed" in parts:
        numbers = torch.tensor(E2M1_LEVELS)[unpacked(parts["weight_packed"])]
        scales = scales.float() if scales.dtype != torch.uint8 else 2.0 ** (scales.float() - 127)
        scales = scales / parts.get("weight_global_scale", 1.0)
    else:
        numbers = parts["weight"].float()
    if "weight_scale_inv" in parts:
        scales = scales.repeat_interleave(128, 0)[: len(numbers)]
        return numbers * scales.repeat_interleave(128, 1)[:, : numbers.shape[1]]
    return numbers * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)


def levels_of(kind: str) -> Tensor:
    """Return every number of a format's codes."""
    if kind.startswith("fp8"):
        numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        return numbers[numbers.isfinite()]
    return torch.arange(-127.0, 128) if kind == "int8" else torch.tensor(E2M1_LEVELS) if "fp4" in kind else INT4[kind]


INT4 = {"int4": torch.arange(-8.0, 8), "int4_asym": torch.arange(16.0)}


@pytest.mark.parametrize("shape", [(128, 256), (5, 32), (130, 384)])
@pytest.mark.parametrize("kind", FORMATS)
def test_each_number_is_rounded_to_the_nearest_code(kind: str, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[1] = 0
    scheme = FORMATS[kind].scheme(weight.abs().max(), group=GROUPS[kind] or FORMATS[kind].group, dtype=torch.bfloat16)
    coded = round_matrix(weight, scheme)
    written = read_matrix({f"x.{name}": part for name, part in FORMATS[kind].parts(coded, scheme).items()}, "x")
    torch.testing.assert_close(coded.weight(), written, rtol=0, atol=0)
    group = scheme.group or shape[1]
    scales = coded.scales_OG.repeat_interleave(group, 1)[:, : shape[1], None]
    zeros = 0.0 if coded.zeros_OG is None else coded.zeros_OG.repeat_interleave(group, 1)[..., None]
    possible = (levels_of(kind) - zeros) * scales
    nearest = (possible - weight[..., None]).abs().amin(-1)
    assert ((written - weight).abs() <= nearest * (1 + 1e-5) + 1e-7).all()
    assert (written[1] == 0).all()
    if kind == "fp8" and shape[0] % 128 == 0:
        theirs = Fp8Dequantize(None)._dequantize_one(
            coded.numbers_OI.to(torch.float8_e4m3fn), coded.scales_OG[::128].contiguous()
        )
        torch.testing.assert_close(theirs.float(), written)
    # Half a step at the largest number of a group, relative to it.
    step = {"fp8": 1 / 14, "fp8_dynamic": 1 / 14, "int8": 1 / 127, "int4": 0.3, "int4_asym": 0.3}.get(kind, 1 / 3)
    assert ((written - weight).abs() <= step * weight.abs().amax()).all()


@pytest.mark.parametrize("kind", PRESETS)
def test_config_equals_the_preset_of_compressed_tensors(kind: str) -> None:
    config = FORMATS[kind].config(FORMATS[kind].group, ["lm_head"])
    (scheme,) = config["config_groups"].values()
    assert {key: scheme["weights"][key] for key in PRESETS[kind]} == PRESETS[kind]
    assert (config["quant_method"], config["ignore"], scheme["targets"]) == (
        "compressed-tensors",
        ["lm_head"],
        ["Linear"],
    )
    # vLLM and compressed-tensors widen float and packed weights, but multiply int8 weights by rounded inputs only.
    assert (scheme["input_activations"] is not None) == (kind in ("int8", "fp8_dynamic"))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("kind", FORMATS)
def test_written_checkpoint_has_every_tensor(kind: str, family: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    directory, _ = tiny_model(family, **MOE_SIZES.get(family, SIZES))
    quantize_checkpoint(directory, tmp_path / "q", kind, group=GROUPS[kind])
    before, after = open_checkpoint(directory), load_all(tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    left_out = config.get("ignore", config.get("modules_to_not_convert"))
    assert len({file.stat().st_mode for file in (tmp_path / "q").iterdir()}) == 1, "one umask for all files"
    for name in before.shapes:
        stem, exact = name.removesuffix(".weight"), before.read(name)
        is_matrix = exact.dim() == 2 and ".layers." in name
        if is_matrix and not stem.endswith(("gate", "shared_expert_gate")):
            read = read_matrix(after, stem)
            assert 0 < (read - exact).norm() < exact.norm() * (0.15 if "4" in kind else 0.04)
            assert stem not in left_out
        else:
            assert torch.equal(after[name], exact)
            assert not is_matrix or stem in left_out
    assert "lm_head" in left_out
    if kind == "nvfp4":
        scales = {n.rpartition(".self_attn.")[0]: [] for n in after if "q_proj.weight_global" in n}
        for name, part in after.items():
            if name.endswith(tuple(f"{x}_proj.weight_global_scale" for x in "qkv")):
                scales[name.rpartition(".self_attn.")[0]].append(float(part))
        assert all(len(values) == 3 and len(set(values)) == 1 for values in scales.values()), "fused: one global scale"


MOE_SIZES = {
    "qwen2_moe": SIZES | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
}


def load_all(directory: Path) -> dict[str, Tensor]:
    return {name: part for file in directory.glob("*.safetensors") for name, part in load_file(file).items()}


@pytest.mark.parametrize(
    ("kind", "group", "message"),
    [
        ("int3", None, "unknown quantization format 'int3'; choose one of fp8, "),
        ("nvfp4", 32, "fixed group size"),
        ("int4", None, r"has (48|80) inputs, which int4's groups of 128 do not divide; use --group 16"),
        ("mxfp4", None, "has (48|80) inputs, which mxfp4's groups of 32 do not divide; use --to fp8 or int8"),
    ],
)
def test_impossible_settings_are_refused(
    kind: str, group: int | None, message: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=message):
        quantize_checkpoint(tiny_model("llama")[0], tmp_path / "q", kind, group=group)
    assert not list(tmp_path.iterdir())


def test_default_group_divides_all_inputs(tiny_model: MakeModel, tmp_path: Path) -> None:
    directory, _ = tiny_model("llama", hidden_size=64, intermediate_size=128)
    lines: list[str] = []
    quantize_checkpoint(directory, tmp_path / "q", "int4", say=lines.append)
    assert re.search("has 64 inputs, which int4's groups of 128 do not divide: using groups of 64", lines[0])
    assert lines[-1] == f"layer {len(lines) - 1} of {len(lines) - 1} quantized"
    widths = {part.shape[1] for name, part in load_all(tmp_path / "q").items() if name.endswith(".weight_scale")}
    assert widths == {1, 2}
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64
    with pytest.raises(SpecError, match="64 inputs, which int4's groups of 128 do not divide; use --group 64"):
        quantize_checkpoint(directory, tmp_path / "again", "int4", group=128)


def test_nothing_is_overwritten_or_quantized_twice(tiny_model: MakeModel, tmp_path: Path) -> None:
    directory, _ = tiny_model("llama")
    quantize_checkpoint(directory, tmp_path / "q", "int8")
    with pytest.raises(SpecError, match="q already exists"):
        quantize_checkpoint(directory, tmp_path / "q", "int8")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(SpecError, match="link already exists"):
        quantize_checkpoint(directory, tmp_path / "link", "int8")
    with pytest.raises(SpecError, match=r"cannot be written: .*too long"):
        quantize_checkpoint(directory, tmp_path / ("q" * 300), "int8")
    with pytest.raises(SpecError, match="already quantized"):
        quantize_checkpoint(tmp_path / "q", tmp_path / "again", "int4")
    (tmp_path / "new.unfinished").mkdir()
    with pytest.raises(SpecError, match=r"new\.unfinished exists, from a run that was interrupted or still runs"):
        quantize_checkpoint(directory, tmp_path / "new", "int8")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_interrupted_run_leaves_no_directory(
    error: BaseException, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(write, "save_file", fail)
    expected = (KeyboardInterrupt, None) if isinstance(error, KeyboardInterrupt) else (SpecError, "No space left")
    with pytest.raises(expected[0], match=expected[1]):
        quantize_checkpoint(tiny_model("llama")[0], tmp_path / "q", "int8")
    assert not list(tmp_path.iterdir())


def test_files_of_another_run_are_not_deleted(tiny_model: MakeModel, tmp_path: Path) -> None:
    """It may begin to write while this one calibrates."""

    def calibrate() -> dict[str, Tensor]:
        (tmp_path / "q.unfinished").mkdir()
        return {}

    with pytest.raises(SpecError, match=r"q: cannot be written: .*exists"):
        quantize_checkpoint(tiny_model("llama")[0], tmp_path / "q", "int8", calibrate=calibrate)
    assert (tmp_path / "q.unfinished").is_dir()


def test_full_disk_is_refused_before_writing(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(SpecError, match=r"q needs .* MiB, and .* has 0 MiB free"):
        quantize_checkpoint(tiny_model("llama")[0], tmp_path / "q", "int8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", torch.full((80, 48), torch.nan), "a value that is not a finite number"),
        ("model.layers.1.mlp.experts.down_proj", torch.ones(2, 48, 20), "stacks the experts in one tensor"),
    ],
)
def test_tensors_that_cannot_be_quantized_are_refused(
    name: str, tensor: Tensor, message: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory, _ = tiny_model("llama")
    (tmp_path / "m").mkdir()
    shutil.copy(directory / "config.json", tmp_path / "m")
    save_file(load_all(directory) | {name: tensor}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(SpecError, match=f"{re.escape(name)} .*{message}"):
        quantize_checkpoint(tmp_path / "m", tmp_path / "q", "fp8")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_are_measured_on_a_gpu_only() -> None:
    with pytest.raises(SpecError, match="no CUDA device"):
        bench_kernels()
