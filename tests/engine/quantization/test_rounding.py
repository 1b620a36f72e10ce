"""Rounding with error compensation: more accurate products, and plain rounding if inputs are uncorrelated."""

from __future__ import annotations

import pytest
import torch

from engine.quantization.calibration import inputs_of
from engine.quantization.rounding import round_with_compensation
from engine.quantization.write import fp8_parts, int8_parts, quantize_checkpoint
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import MakeModel, MakeRunner, reference_logits


def correlated(num_tokens: int, num_inputs: int) -> torch.Tensor:
    """Return correlated inputs, like activations."""
    generator = torch.Generator().manual_seed(0)
    few = torch.randn(num_tokens, 12, generator=generator) @ torch.randn(12, num_inputs, generator=generator)
    return few + 0.1 * torch.randn(num_tokens, num_inputs, generator=generator)


@pytest.mark.parametrize(("parts", "scale"), [(fp8_parts, "weight_scale_inv"), (int8_parts, "weight_scale")])
def test_compensation_reduces_product_error(parts, scale: str) -> None:
    weight, x = torch.randn(96, 200, generator=torch.Generator().manual_seed(1)), correlated(500, 200)

    def error(gram: torch.Tensor | None) -> float:
        made = parts(weight, gram)
        scales = made[scale]
        if scale == "weight_scale_inv":
            scales = scales.repeat_interleave(128, 0)[:96].repeat_interleave(128, 1)[:, :200]
        return float(((made["weight"].float() * scales - weight) @ x.T).square().mean())

    assert error(x.T @ x) < 0.5 * error(None)


def test_uncorrelated_inputs_round_to_nearest() -> None:
    weight = torch.randn(5, 300, generator=torch.Generator().manual_seed(1))
    for gram in (torch.eye(300), torch.zeros(300, 300)):
        assert torch.equal(round_with_compensation(weight, gram, lambda x, i: x.round()), weight.round())


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
    for grams in ({}, inputs_of(directory, seen)):
        into = tmp_path_factory.mktemp("written") / "fp8"
        quantize_checkpoint(directory, into, "fp8", grams=grams)
        logits = step(make_runner(into), [token_ids], [(0, 0, 90)])
        errors.append(float((logits[0] - exact).square().mean()))
    assert errors[1] < errors[0]
