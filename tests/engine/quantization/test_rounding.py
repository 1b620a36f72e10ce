"""Rounding with error compensation: more accurate products, and plain rounding if inputs are uncorrelated."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core.model import config as model_config
from engine.quantization.calibration import inputs_of
from engine.quantization.channel_scales import find_folds, find_scales
from engine.quantization.formats import FORMATS, round_matrix
from engine.quantization.write import by_stored_name, quantize_checkpoint
from engine.weights.open_checkpoint import open_checkpoint, open_model
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import (
    CONFIGS,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    LLAMA4,
    MINIMAX_M2,
    MISTRAL4,
    MakeModel,
    MakeRunner,
    random_model,
    reference_logits,
    tiny_config,
)

_FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CHANGES = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": _FEW | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": _FEW,
    "gemma4": {"hidden_size_per_layer_input": 0, "sliding_window": 9},
    "phi3": {"head_dim": ...},
    "gpt_oss": GPT_OSS,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "minimax_m2": MINIMAX_M2,
    "mistral4": MISTRAL4,
    "llama4": LLAMA4,
} | {family: {"sliding_window": 9} for family in ("gemma2", "gemma3")}


def correlated(num_tokens: int, num_inputs: int) -> torch.Tensor:
    """Return correlated inputs, like activations."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(num_tokens, 12, generator=generator) @ torch.randn(12, num_inputs, generator=generator)
    return few + 0.1 * torch.randn(num_tokens, num_inputs, generator=generator)


@pytest.mark.parametrize("kind", FORMATS)
def test_compensation_reduces_product_error(kind: str) -> None:
    weight, x = torch.randn(96, 256, generator=torch.Generator().manual_seed(1)), correlated(500, 256)
    scheme = FORMATS[kind].scheme(weight.abs().max(), group=FORMATS[kind].group, dtype=torch.float32)

    def error(gram: torch.Tensor | None) -> float:
        return float(((round_matrix(weight, scheme, gram).weight() - weight) @ x.T).square().mean())

    assert error(x.T @ x) < 0.5 * error(None)


@pytest.mark.parametrize("kind", FORMATS)
def test_uncorrelated_inputs_round_to_nearest(kind: str) -> None:
    weight = torch.randn(5, 288, generator=torch.Generator().manual_seed(1))
    scheme = FORMATS[kind].scheme(weight.abs().max(), group=min(FORMATS[kind].group, 96), dtype=torch.float32)
    plain = round_matrix(weight, scheme).weight()
    assert torch.equal(round_matrix(weight, scheme, torch.eye(288)).weight(), plain)
    assert round_matrix(weight, scheme, torch.zeros(288, 288)).weight().isfinite().all()


# Recurrent layers, gates and index keys read the norms, too: these families are rounded without scales.
UNSCALED = {
    "deepseek_v32",
    "glm_moe_dsa",
    "granite_hybrid",
    "lfm2",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
}


@pytest.mark.parametrize("family", [family for family in CONFIGS if family not in UNSCALED])
def test_channel_scales_change_no_result(family: str, make_runner: MakeRunner, tmp_path: Path) -> None:
    """Guards the fold table against families whose norms or matrices have another form."""
    model = random_model(tiny_config(family, **CHANGES.get(family, {})))
    model.save_pretrained(tmp_path)
    seen = prompts(20, 30)
    checkpoint = open_checkpoint(tmp_path)
    stems = [name.removesuffix(".weight") for name in checkpoint.shapes if name.endswith(".weight")]
    config = model_config.load(tmp_path)
    folds = find_folds(stems, config)
    grams = by_stored_name(open_model(tmp_path, config), inputs_of(tmp_path, seen))
    scheme_for = partial(FORMATS["int4"].scheme, group=0, dtype=torch.float32)
    scales = find_scales(folds, checkpoint.read, scheme_for, grams)
    # The values of Gemma 4 pass a norm, and its norms have other neighbors.
    assert len(scales.rows) >= (1 if family == "gemma4" else 2) * model.config.num_hidden_layers
    assert sum(not bool((factors == 1).all()) for factors in scales.rows.values()) > len(scales.rows) / 2
    (tmp_path / "scaled").mkdir()
    scaled = {name: scales.apply(name, checkpoint.read(name)).contiguous() for name in checkpoint.shapes}
    save_file(scaled, tmp_path / "scaled" / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(tmp_path / "config.json", tmp_path / "scaled")
    logits = step(make_runner(tmp_path / "scaled"), seen[:1], [(0, 0, 20)])
    torch.testing.assert_close(logits[0], reference_logits(model, seen[0])[-1], atol=1e-3, rtol=1e-3)


def test_grams_equal_recorded_inputs(tiny_model: MakeModel) -> None:
    directory, model = tiny_model("llama")
    token_ids = prompts(20, 7)
    grams = inputs_of(directory, token_ids)
    matrices = {name.removesuffix(".weight") for name, _ in model.named_parameters() if name.endswith("_proj.weight")}
    assert set(grams) == matrices | {"lm_head"}
    with torch.inference_mode():
        x = torch.cat(
            [model.model.layers[0].input_layernorm(model.model.embed_tokens(torch.tensor(p))) for p in token_ids]
        )
    torch.testing.assert_close(grams["model.layers.0.self_attn.q_proj"], x.T @ x, atol=1e-3, rtol=1e-4)


def test_calibrated_checkpoint_is_more_accurate(
    tiny_model: MakeModel, make_runner: MakeRunner, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory, model = tiny_model("llama", hidden_size=64, intermediate_size=128)
    seen, (token_ids,) = prompts(*[90] * 20)[1:], prompts(90)
    exact, errors = reference_logits(model, token_ids)[-1], []
    for calibrate in (dict, lambda: inputs_of(directory, seen)):
        into = tmp_path_factory.mktemp("written") / "fp8"
        quantize_checkpoint(directory, into, "fp8", calibrate=calibrate)
        logits = step(make_runner(into), [token_ids], [(0, 0, 90)])
        errors.append(float((logits[0] - exact).square().mean()))
    assert errors[1] < errors[0]
