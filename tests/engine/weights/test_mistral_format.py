"""Checkpoints in Mistral's own format give transformers' logits: rotation, names, experts, latents, few bits, ranks."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from core.model import config as model_config
from core.types.errors import SpecError
from engine.quantization.write import quantize_checkpoint
from tests.engine.gang import StartGang
from tests.engine.mistral_files import FP8, NVFP4, fp8, nvfp4, write_mistral
from tests.engine.quantized_files import Quantised, fp8_channels
from tests.engine.runner.test_parallel import check_ranks
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import MISTRAL4, YARN, MakeModel, MakeRunner, random_model, reference_logits, tiny_config

_SCALED = YARN | {"llama_4_scaling_beta": 0.3}
_UNSCALED = _SCALED | {"attention_factor": 1.0}
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = MISTRAL4 | {"rope_parameters": _UNSCALED, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "mistral, tied, one window": ("mistral", {"tie_word_embeddings": True, "sliding_window": 11}),
    "mistral, yarn": ("mistral", {"rope_parameters": YARN}),
    "mixtral": ("mixtral", _MIXTRAL),
    "ministral3": ("ministral3", {"rope_parameters": _UNSCALED}),
    "ministral3, scaled": ("ministral3", {"rope_parameters": _SCALED}),
    "mistral4": ("mistral4", _LATENT),
    "mistral4, scaled": ("mistral4", _LATENT | {"rope_parameters": _SCALED | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "mistral4, long queries": ("mistral4", _LATENT | {"q_lora_rank": None, "routed_scaling_factor": 1.7}),
}
_COMPRESSED_FP8 = {"quant_method": "compressed_tensors", "format": "float-quantized"}
_EXPERTS = r".*experts\.(\d+\.)?w[123]"
QUANTIZED: dict[str, tuple[str, Callable[[Tensor], Quantised], dict[str, Any]]] = {
    "ministral3, fp8": ("ministral3", fp8, {"quantization": FP8}),
    "ministral3, fp8 per row": ("ministral3", fp8_channels, {"quantization": _COMPRESSED_FP8}),
    "mistral4, fp8": ("mistral4", fp8, {"quantization": FP8 | {"qscheme_act": "NO_SCALES"}}),
    "mistral4, nvfp4": ("mistral4", nvfp4, {"quantization": NVFP4, "matrices": _EXPERTS}),
}


def _equals(directory: Path, model: PreTrainedModel, make_runner: MakeRunner) -> None:
    sequences = prompts(1, 37, 60, 90)
    logits = step(make_runner(directory), sequences, [(i, 0, len(s)) for i, s in enumerate(sequences)])
    for row, sequence in zip(logits, sequences, strict=True):
        torch.testing.assert_close(row, reference_logits(model, sequence)[-1], atol=1e-4, rtol=1e-4)


def _written(directory: Path, name: str, **how: Any) -> PreTrainedModel:
    family, changes = FAMILIES[name]
    # Mistral4Config changes its rope_parameters.
    model = random_model(tiny_config(family, **deepcopy(changes)))
    write_mistral(directory, model, **how)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_own_format_equals_transformers(name: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    _equals(tmp_path, _written(tmp_path, name), make_runner)


@pytest.mark.parametrize("name", QUANTIZED)
def test_few_bits_equal_transformers_on_the_same_numbers(
    name: str, make_runner: MakeRunner, tmp_path: Path, start_gang: StartGang
) -> None:
    family, quantise, how = QUANTIZED[name]
    model = _written(tmp_path, family, quantise=quantise, num_parts=3, **how)
    _equals(tmp_path, model, make_runner)
    check_ranks(start_gang, 2, tmp_path, model)


def test_config_json_comes_first(tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path) -> None:
    """The hub's repositories have both formats; the weights of one are read."""
    directory, model = tiny_model("ministral3", rope_parameters=_UNSCALED)
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    _written(tmp_path, "ministral3", quantise=fp8, num_parts=2, quantization=FP8, dim=7)
    assert model_config.quantization_config(tmp_path) == {}
    _equals(tmp_path, model, make_runner)


def test_transformers_names_beside_params(tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path) -> None:
    """The names of tensors decide about their order; a repacked file may have transformers' names."""
    directory, model = tiny_model("ministral3", rope_parameters=_UNSCALED)
    _written(tmp_path, "ministral3")
    (tmp_path / "consolidated.safetensors").unlink()
    shutil.copy(directory / "model.safetensors", tmp_path)
    _equals(tmp_path, model, make_runner)


@pytest.mark.parametrize("key", ["vision_encoder", "multimodal"])
def test_towers_are_not_read(
    key: str, make_runner: MakeRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vision = {"hidden_size": 8, "image_token_id": 10}
    given = {key: vision if key == "vision_encoder" else {"vision_encoder_args": vision}}
    model = _written(tmp_path, "ministral3", **given)
    tensors = load_file(file := tmp_path / "consolidated.safetensors")
    layer = "vision_encoder.transformer.layers.0.attention"
    for name in (f"{layer}.wq", f"{layer}_norm", "vision_language_adapter.w_in", "patch_merger.merging_layer"):
        tensors[f"{name}.weight"] = torch.ones(3, 5)
    save_file(tensors, file)
    with caplog.at_level(logging.INFO):
        _equals(tmp_path, model, make_runner)
    (line,) = [record.message for record in caplog.records if "text model only" in record.message]
    assert line.endswith("4 tensors of patch_merger, vision_encoder, vision_language_adapter are not read")


def test_tensors_that_do_not_fit_are_named(make_runner: MakeRunner, tmp_path: Path) -> None:
    _written(tmp_path, "mistral4")
    tensors = load_file(file := tmp_path / "consolidated.safetensors")
    tensors["layers.1.router_biases"] = torch.ones(8)
    del tensors["layers.2.attention.wkv_b.weight"]
    save_file(tensors, file)
    with pytest.raises(SpecError) as caught:
        make_runner(tmp_path)
    for part in ("missing: model.layers.2.self_attn.kv_b_proj.weight", "not expected: model.layers.1.router_biases"):
        assert part in str(caught.value)


def test_own_format_is_not_quantized(tmp_path: Path) -> None:
    _written(tmp_path / "model", "mistral")
    with pytest.raises(SpecError, match=r"own format is not quantized; use model\*\.safetensors and config\.json"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "into", "fp8")
