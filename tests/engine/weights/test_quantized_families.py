"""Published quantized files of families that fuse, stack, interleave, nest or rename their tensors.

Each is compared with transformers on the dequantized numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from core.model.config import load as load_config
from core.types.errors import SpecError
from engine.config import EngineConfig
from engine.quantization.calibration import inputs_of
from engine.quantization.write import by_stored_name, quantize_checkpoint
from engine.runner.runner import ModelRunner
from engine.weights.open_checkpoint import open_checkpoint, open_model
from tests.engine.gang import StartGang
from tests.engine.quantized_files import (
    BLOCK,
    GROUP,
    Quantised,
    awq,
    fp8_blocks,
    fp8_channels,
    fp8_tensor,
    gptq,
    int4_packed,
    mxfp4_blocks,
    nf4,
)
from tests.engine.runner.test_parallel import check_ranks
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GEMMA,
    GEMMA3_ROPES,
    GEMMA4_MOE,
    GLM4_MOE,
    GPT_OSS,
    LLAMA4,
    MINIMAX_M2,
    random_model,
    reference_logits,
    tiny_config,
)

# Groups divide the inputs of every matrix; no block of 128 does.
SIZES = {"hidden_size": 96, "intermediate_size": 64}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4, "input_activations": None}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
}
CHANNELS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
# Matrices of attention and MLPs.
_ALL = r".*(_proj|\.w[123])\.weight"


@dataclass(frozen=True)
class Published:
    """Published form of a family. matrices: regular expression of the tensors that it quantizes."""

    family: str
    quantise: Callable[[Tensor], Quantised]
    config: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    matrices: str = _ALL
    # Names and config of the larger model, of which the language model is a part.
    prefixes: tuple[tuple[str, str], ...] = ()
    nested: dict[str, Any] = field(default_factory=dict)
    # Whether the config of the language model holds the settings of the quantization.
    is_inside: bool = False


QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
PHI3 = {"head_dim": ..., "hidden_size": 64, "intermediate_size": 96}
CASES = {
    "gpt-oss MXFP4": Published(
        "gpt_oss",
        mxfp4_blocks,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        GPT_OSS | SIZES,
        r".*experts\.\w+_proj",
    ),
    "Kimi-K2.5 INT4": Published(
        "deepseek_v3",
        int4_packed,
        W4A16,
        DEEPSEEK_V3 | SIZES | {"moe_intermediate_size": 32},
        r".*mlp\.experts\..*_proj\.weight",
        (("", "language_model."),),
        {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"},
        is_inside=True,
    ),
    # Published files differ in which matrices of the indexer are quantized.
    "DeepSeek-V3.2 FP8": Published(
        "deepseek_v32", fp8_blocks, FP8_BLOCKS, DEEPSEEK_V32, r".*(_[ab]_proj|o_proj)\.weight"
    ),
    "DeepSeek-V3.2 FP8, indexer too": Published(
        "deepseek_v32", fp8_blocks, FP8_BLOCKS, DEEPSEEK_V32, r".*(_[ab]_proj|o_proj|wq_b|wk)\.weight"
    ),
    "Phi-3 FP8 channels": Published("phi3", fp8_channels, CHANNELS, PHI3),
    "Phi-3 FP8 tensor": Published("phi3", fp8_tensor, {"quant_method": "fp8"}, PHI3),
    "Phi-3 FP8 blocks": Published("phi3", fp8_blocks, FP8_BLOCKS, PHI3),
    "Phi-3 AWQ": Published("phi3", awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}, PHI3),
    "Phi-3 GPTQ": Published(
        "phi3", gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, PHI3
    ),
    "Phi-3 NF4": Published("phi3", nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, PHI3),
    "GLM-4.5 FP8": Published("glm4_moe", fp8_blocks, FP8_BLOCKS, GLM4_MOE),
    "MiniMax-M2 FP8": Published("minimax_m2", fp8_blocks, FP8_BLOCKS, MINIMAX_M2),
    "Qwen3-MoE FP8": Published("qwen3_moe", fp8_blocks, FP8_BLOCKS, QWEN3_MOE),
    "Llama 4 FP8": Published("llama4", fp8_channels, CHANNELS, LLAMA4, rf"{_ALL}|.*experts\.\w+_proj"),
    "Gemma 4 INT4 experts": Published(
        "gemma4", int4_packed, W4A16, GEMMA4_MOE | SIZES | {"moe_intermediate_size": 32}, r".*experts\.\w+_proj"
    ),
    "Gemma 3 INT4": Published(
        "gemma3",
        int4_packed,
        W4A16 | {"ignore": ["lm_head", "re:.*vision_tower.*"]},
        GEMMA | SIZES | {"rope_parameters": GEMMA3_ROPES},
        prefixes=(("model.", "language_model.model."),),
        nested={"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_dequantized_model(name: str, tmp_path: Path) -> None:
    into, model = write(tmp_path, CASES[name])
    (tokens,) = prompts(30)
    runner = ModelRunner(EngineConfig(model_dir=into, dtype="float32", block_size=8, num_blocks=12))
    logits = step(runner, [tokens], [(0, 0, 30)])
    torch.testing.assert_close(logits[0], reference_logits(model, tokens)[-1], atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["gpt-oss MXFP4", "Phi-3 FP8 tensor", "Phi-3 NF4", "Llama 4 FP8"])
def test_ranks_share_the_stored_tensors(name: str, tmp_path: Path, start_gang: StartGang) -> None:
    check_ranks(start_gang, 2, *write(tmp_path, CASES[name]), tolerance=1e-3)


@pytest.mark.parametrize("name", ["gpt-oss MXFP4", "Gemma 3 INT4"])
def test_cpu_kernels_keep_the_stored_bits(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    # The router has no choice that rounding could change.
    case = replace(case, changes=case.changes | ({"num_experts_per_tok": 6} if case.family == "gpt_oss" else {}))
    into, model = write(tmp_path, case)
    (tokens,) = prompts(30)
    expected = reference_logits(model, tokens)[-1]
    runner = ModelRunner(EngineConfig(model_dir=into, dtype="bfloat16", block_size=8, num_blocks=12))
    logits = step(runner, [tokens], [(0, 0, 30)])
    assert float((logits[0].float() - expected).norm() / expected.norm()) < 0.12
    assert "quantized matrices are held in" not in caplog.text


def test_stacked_experts_of_other_formats_are_named(tmp_path: Path) -> None:
    """ModelOpt stacks Llama 4's experts in FP8 or NVFP4, with scales under names of their own."""
    name = "model.layers.1.feed_forward.experts.gate_up_proj"
    tensors = {name: torch.ones(2, 8, 8).to(torch.float8_e4m3fn), f"{name}_weight_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(SpecError, match=rf"{name} \(F8_E4M3\): experts in one tensor are read as MXFP4 blocks only"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("family", ["phi3", "minimax_m2", "gemma3, nested"])
def test_written_checkpoint_loads_under_the_familys_names(family: str, tmp_path: Path) -> None:
    """Calibrated inputs reach fused, renamed and nested matrices; other parts of the model stay as they are."""
    name, _, is_nested = family.partition(", ")
    changes = {"phi3": PHI3, "minimax_m2": MINIMAX_M2 | SIZES | {"num_experts_per_tok": 6}}.get(name, GEMMA | SIZES)
    prefixes = (("model.", "language_model.model."),) if is_nested else ()
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"} if is_nested else {}
    case = Published(name, int4_packed, {}, changes, "none", prefixes, nested)
    source, model = write(tmp_path, case)
    tower = source / "model.safetensors"
    tensors = load_file(tower) | {"vision_tower.encoder.layers.0.mlp.up_proj.weight": torch.ones(5, 7)}
    save_file(tensors if is_nested else load_file(tower), tower)
    (tokens,) = prompts(90)
    grams = inputs_of(source, prompts(*[90] * 4)[1:])
    stored = by_stored_name(open_model(source, load_config(source)), grams)
    quantized = {stem.removesuffix(".weight") for stem in tensors if stem.endswith("_proj.weight")}
    assert {stem for stem in quantized if "vision" not in stem} <= set(stored)
    quantize_checkpoint(source, tmp_path / "int8", "int8", calibrate=lambda: grams)
    written = open_checkpoint(tmp_path / "int8")
    ends = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    matrices = {name for name in tensors if name.endswith(ends) and "vision" not in name}
    assert {name for name in written.shapes if written.is_quantized(name)} == matrices
    runner = ModelRunner(EngineConfig(model_dir=tmp_path / "int8", dtype="float32", block_size=8, num_blocks=12))
    logits, expected = step(runner, [tokens], [(0, 0, 90)])[0], reference_logits(model, tokens)[-1]
    assert 0 < float((logits - expected).norm() / expected.norm()) < 0.15


def write(directory: Path, case: Published) -> tuple[Path, Any]:
    """Write the published form to `published`. Return it, and transformers' model of the dequantized numbers."""
    plain, into = directory / "plain", directory / "published"
    random_model(tiny_config(case.family, **case.changes)).save_pretrained(plain)
    tensors, published = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in tensors.items():
        is_quantized = ".layers." in name and re.fullmatch(case.matrices, name)
        found = _quantised(name, tensor, case) if is_quantized else {name: tensor}
        published |= {_renamed(stored, case): part.contiguous() for stored, part in found.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    settings = {"quantization_config": case.config} if case.config else {}
    if case.nested:
        inner = config | (settings if case.is_inside else {})
        config = case.nested | {"text_config": inner} | ({} if case.is_inside else settings)
        published["vision_tower.encoder.layers.0.mlp.fc1.weight"] = torch.ones(4, 4)
    else:
        config |= settings
    into.mkdir()
    (into / "config.json").write_text(json.dumps(config))
    save_file(published, into / "model.safetensors")
    return into, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def _renamed(name: str, case: Published) -> str:
    return next((to + name.removeprefix(start) for start, to in case.prefixes if name.startswith(start)), name)


def _quantised(name: str, tensor: Tensor, case: Published) -> dict[str, Tensor]:
    """Return the published tensors of a stored one, and round it in place to their numbers."""
    found = dict[str, Tensor]()
    stacked: dict[str, list[Tensor]] = {}
    for stem, part_OI in _matrices(name.removesuffix(".weight"), tensor, case):
        parts, numbers = case.quantise(part_OI)
        part_OI.copy_(numbers)
        for suffix, part in parts.items():
            if case.quantise is mxfp4_blocks:
                stacked.setdefault(f"{name}_{suffix}", []).append(part)
            else:
                found[f"{stem}.{suffix}"] = part
    return found | {stored: torch.stack(parts) for stored, parts in stacked.items()}


def _matrices(stem: str, tensor: Tensor, case: Published) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices (O, I) of a stored tensor, as views. Llama 4's and Gemma 4's experts are published apart."""
    if tensor.dim() == 2:
        yield stem, tensor
        return
    owner, _, last = stem.rpartition(".")
    for index, expert in enumerate(tensor):
        expert_OI = expert if case.family == "gemma4" else expert.T
        if case.family == "gpt_oss" or last == "down_proj":
            yield f"{owner}.{index}.{last}", expert_OI
            continue
        for part, half_OI in zip(("gate_proj", "up_proj"), expert_OI.chunk(2), strict=True):
            yield f"{owner}.{index}.{part}", half_OI
