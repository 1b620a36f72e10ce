"""Tensors that files store fused, stacked, under other names, or as a part of a larger model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.model import config as model_config
from core.types.errors import SpecError
from engine.weights.open_checkpoint import open_model
from tests.engine.model.test_models import FAMILIES
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import MakeModel, MakeRunner

_SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 10,
    "max_position_embeddings": 128,
}
_GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
_LLAMA4 = {"architectures": ["Llama4ForCausalLM"], "num_local_experts": 3}
_QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "num_experts_per_tok": 2}
_PHI3 = {"architectures": ["Phi3ForCausalLM"]}
_LLAMA = {"architectures": ["LlamaForCausalLM"]}
_LAYER = "model.layers.0."
_EXPERTS = f"{_LAYER}mlp.experts."


def write(directory: Path, family: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    (directory / "config.json").write_text(json.dumps(_SIZES | family))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("family", "tensors", "complaint"),
    [
        (_GPT_OSS, {f"{_EXPERTS}gate_up_proj": (2, 8, 8)}, "is (2, 8, 8): 2 experts, but config.json has 3"),
        (_GPT_OSS, {f"{_EXPERTS}gate_up_proj": (1 << 40, 0, 8)}, "1099511627776 experts, but config.json has 3"),
        (_GPT_OSS, {f"{_EXPERTS}gate_up_proj": (3, 8, 7)}, "gate_up_proj has 7 rows, and must have an even number"),
        (_GPT_OSS, {f"{_EXPERTS}gate_up_proj": (3,)}, "gate_up_proj is (3,), and must have 3 dimensions"),
        (_GPT_OSS, {f"{_EXPERTS}down_proj": ()}, "down_proj is (), and must have 3 dimensions"),
        (_GPT_OSS, {f"{_EXPERTS}down_proj_bias": (3, 4, 8)}, "down_proj_bias is (3, 4, 8), and must have 2 dimensions"),
        (_PHI3, {f"{_LAYER}self_attn.qkv_proj.weight": ()}, "qkv_proj.weight is (), and must have 2 dimensions"),
        (
            _PHI3,
            {f"{_LAYER}self_attn.qkv_proj.weight": (17, 8)},
            "self_attn.qkv_proj.weight has 17 rows, but q_proj, k_proj, v_proj need 16",
        ),
        (
            _LLAMA4,
            {f"{_LAYER}feed_forward.router.weight": (3, 8), f"{_LAYER}mlp.gate.weight": (3, 8)},
            "mlp.gate.weight is in the files twice, as",
        ),
        (
            _LLAMA,
            {"language_model.model.norm.weight": (8,), "model.norm.weight": (8,)},
            "model.norm.weight is in the files twice, as",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    family: dict[str, Any], tensors: dict[str, tuple[int, ...]], complaint: str, tmp_path: Path
) -> None:
    write(tmp_path, family, {name: torch.zeros(shape) for name, shape in tensors.items()})
    with pytest.raises(SpecError) as caught:
        open_model(tmp_path, model_config.load(tmp_path))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("model.norm.weight", torch.float8_e4m3fn, "F8_E4M3"),
        ("model.norm.weight", torch.int64, "I64"),
        (f"{_EXPERTS}gate_up_proj", torch.float8_e4m3fn, "F8_E4M3"),
        (f"{_LAYER}self_attn.sinks", torch.uint8, "U8"),
    ],
)
def test_coded_numbers_without_a_quantization_are_refused(
    name: str, dtype: torch.dtype, kind: str, tmp_path: Path
) -> None:
    write(tmp_path, _GPT_OSS, {name: torch.zeros(3, 8, 8).to(dtype)})
    with pytest.raises(SpecError, match=f"has dtype {kind}, and config.json has no quantization_config"):
        open_model(tmp_path, model_config.load(tmp_path))


@pytest.mark.parametrize(("size", "is_transposed"), [(3, False), (3, True), (4, False)])
def test_stacked_experts_are_read_in_either_layout(size: int, is_transposed: bool, tmp_path: Path) -> None:
    """Published files of Qwen3-VL-MoE are transposed, those that transformers 5 saves are not. Square matrices count as
    not transposed, as in transformers."""
    gate_up, down = torch.rand(3, 2 * size, 8), torch.rand(3, 8, size)
    stored = {f"{_EXPERTS}gate_up_proj": gate_up, f"{_EXPERTS}down_proj": down}
    if is_transposed:
        stored = {name: weight.transpose(1, 2).contiguous() for name, weight in stored.items()}
    write(tmp_path, _QWEN3_MOE | {"moe_intermediate_size": size}, stored)
    checkpoint = open_model(tmp_path, model_config.load(tmp_path))
    for name, expected in (("gate", gate_up[1, :size]), ("up", gate_up[1, size:]), ("down", down[1])):
        assert torch.equal(checkpoint.read(f"{_EXPERTS}1.{name}_proj.weight"), expected), name


def test_layers_past_the_last_keep_the_shape_of_the_last(tmp_path: Path) -> None:
    """A file may have layers that the model does not use, such as those of multi-token prediction."""
    weight = torch.arange(64.0).view(8, 8)
    write(tmp_path, _LLAMA4, {f"model.layers.{i}.self_attn.q_proj.weight": weight for i in (0, 7)})
    checkpoint = open_model(tmp_path, model_config.load(tmp_path))
    read = [checkpoint.read(f"model.layers.{i}.self_attn.q_proj.weight") for i in (0, 7)]
    assert torch.equal(read[0], weight[[0, 2, 1, 3, 4, 6, 5, 7]]) and torch.equal(*read)


# Prefixes of published files: of the model's body and of its head.
_OUTER = ("language_model.model.", "language_model.lm_head.")
_INNER = ("model.language_model.", "lm_head.")
# By the larger model's architecture: the text model's family and type, the prefixes, and the other parts.
_WHOLE: dict[str, tuple[str, str, tuple[str, str], tuple[str, ...]]] = {
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
    _, kind, (body, head), towers = _WHOLE[case]
    text = json.loads((text_dir / "config.json").read_text()) | {"model_type": kind}
    whole: dict[str, Any] = {name: text.pop(name, None) for name in ("dtype", "eos_token_id", "tie_word_embeddings")}
    whole |= {"architectures": [case.partition(" ")[0]], "text_config": text, "vision_config": {"hidden_size": 8}}
    (whole_dir / "config.json").write_text(json.dumps(whole))
    tensors = {f"{tower}.blocks.0.weight": torch.ones(3, 5) for tower in towers}
    for name, tensor in load_file(text_dir / "model.safetensors").items():
        new = body + name.removeprefix("model.") if name.startswith("model.") else head + name.removeprefix("lm_head.")
        tensors[new] = tensor
    save_file(tensors, whole_dir / "model.safetensors")


@pytest.mark.parametrize("case", _WHOLE)
def test_a_text_part_equals_the_model_alone(
    case: str, tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, _, _, towers = _WHOLE[case]
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
