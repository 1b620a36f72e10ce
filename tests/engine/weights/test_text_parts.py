"""Language models that are a part of a larger one: read from its files, without its other parts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.model.test_models import FAMILIES
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import MakeModel, MakeRunner

# Prefixes of published files: of the model's body and of its head.
_OUTER = ("language_model.model.", "language_model.lm_head.")
_INNER = ("model.language_model.", "lm_head.")
# By the larger model's architecture: the text model's family and type, the prefixes, and the other parts.
_CASES: dict[str, tuple[str, str, tuple[str, str], tuple[str, ...]]] = {
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3_text", _OUTER, ("vision_tower", "multi_modal_projector")),
    "Gemma4ForConditionalGeneration": (
        *("gemma4", "gemma4_text", _INNER),
        ("model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio"),
    ),
    "Mistral3ForConditionalGeneration": ("mistral", "mistral", _OUTER, ("vision_tower", "multi_modal_projector")),
    "Mistral3ForConditionalGeneration of Ministral": (
        *("ministral3", "ministral3", _INNER),
        ("model.vision_tower", "model.multi_modal_projector"),
    ),
    "Llama4ForConditionalGeneration": ("llama4", "llama4_text", _OUTER, ("vision_model", "multi_modal_projector")),
    "Qwen3VLForConditionalGeneration": ("qwen3", "qwen3_vl_text", _INNER, ("model.visual",)),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_moe", "qwen3_vl_moe_text", _INNER, ("model.visual",)),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_5_text", _INNER, ("model.visual",)),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3_5_moe_text", _INNER, ("model.visual",)),
    "KimiK25ForConditionalGeneration": ("deepseek_v3", "kimi_k2", _OUTER, ("vision_tower", "mm_projector")),
    "Glm4vMoeForConditionalGeneration": ("glm4_moe", "glm4v_moe_text", _INNER, ("model.visual",)),
}


def _embed(text_dir: Path, whole_dir: Path, case: str) -> None:
    """Write a text model's files as a part of a larger model's."""
    _, kind, (body, head), towers = _CASES[case]
    text = json.loads((text_dir / "config.json").read_text()) | {"model_type": kind}
    whole: dict[str, Any] = {name: text.pop(name, None) for name in ("dtype", "eos_token_id", "tie_word_embeddings")}
    whole |= {"architectures": [case.partition(" ")[0]], "text_config": text, "vision_config": {"hidden_size": 8}}
    (whole_dir / "config.json").write_text(json.dumps(whole))
    tensors = {f"{tower}.blocks.0.weight": torch.ones(3, 5) for tower in towers}
    for name, tensor in load_file(text_dir / "model.safetensors").items():
        new = body + name.removeprefix("model.") if name.startswith("model.") else head + name.removeprefix("lm_head.")
        tensors[new] = tensor
    save_file(tensors, whole_dir / "model.safetensors")


@pytest.mark.parametrize("case", _CASES)
def test_a_text_part_equals_the_model_alone(
    case: str, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, _, _, towers = _CASES[case]
    architecture, changes = FAMILIES[family]
    directory, _ = tiny_model(architecture, **changes)
    _embed(directory, tmp_path, case)
    with caplog.at_level(logging.INFO, logger="engine.weights.open_checkpoint"):
        runner = make_runner(tmp_path)
    [record] = [record for record in caplog.records if "text model only" in record.message]
    assert f"{len(towers)} tensors of {', '.join(sorted(towers))} are not read" in record.message
    sequences = prompts(20, 9)
    spans = [(i, 0, len(sequence)) for i, sequence in enumerate(sequences)]
    alone = step(make_runner(directory), sequences, spans)
    torch.testing.assert_close(step(runner, sequences, spans), alone, atol=1e-5, rtol=1e-5)
