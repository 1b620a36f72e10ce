"""Checkpoints as they are published: stale shards, heads that config.json does not describe, and companion tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from core.model.source import resolve
from core.types.errors import SpecError
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from engine.weights.open_checkpoint import open_checkpoint
from tests.engine.quantized_files import fp8_blocks, fp8_channels, int8_channels, write_quantised
from tests.engine.steps import prompts, step
from tests.engine.tiny_models import NEMOTRON_H, random_model, reference_logits, tiny_config

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
ATTENTION = "model.layers.0.self_attn"
DOWN = "model.layers.0.mlp.down_proj"
(TOKENS,) = prompts(30)


def logits_of(directory: Path) -> Tensor:
    config = EngineConfig(model_dir=directory, dtype="float32", block_size=8, num_blocks=12)
    return step(ModelRunner(config), [TOKENS], [(0, 0, 30)])[0]


def check_equal(directory: Path, model: PreTrainedModel) -> None:
    torch.testing.assert_close(logits_of(directory), reference_logits(model, TOKENS)[-1], atol=2e-4, rtol=1e-4)


def written(directory: Path, family: str = "llama", **changes: Any) -> PreTrainedModel:
    model = random_model(tiny_config(family, **(SHAPE | changes)))
    model.save_pretrained(directory)
    return model


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object], **config: Any) -> None:
    """Change the tensors of model.safetensors and keys of config.json."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | config))


@pytest.mark.parametrize("given", [None, [0.3, 0.9]])
def test_time_steps_of_mamba_have_their_own_limits(tmp_path: Path, given: list[float] | None) -> None:
    """huggingface/transformers#48989, ml-explore/mlx-lm#1026: time_step_min is for training only."""
    model = written(tmp_path, "nemotron_h", **NEMOTRON_H | {"time_step_min": 0.5})
    edit(tmp_path, lambda tensors: None, **({"time_step_limit": given} if given else {}))
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = given or (0.0, float("inf"))
    check_equal(tmp_path, model)


def test_index_decides_between_two_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """1CatAI/1Cat-vLLM#407, Blaizzy/mlx-vlm#1464"""
    model = written(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    save_file(tensors, tmp_path / first)
    stale = {f"{DOWN}.weight": torch.zeros(64, 96), "model.layers.9.stale": torch.ones(1)}
    save_file(stale, tmp_path / second)
    weight_map = dict.fromkeys(tensors, first)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check_equal(tmp_path, model)
    # The second shard is read as well, if the index names one of its tensors.
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map | {"model.layers.9.other": second}})
    )
    check_equal(tmp_path, model)
    assert "tensors that the index does not name are not read: model.layers.9.stale" in caplog.text


def test_tensor_outside_the_index_is_missing(tmp_path: Path) -> None:
    model = written(tmp_path)
    names = [
        name for name in load_file(tmp_path / "model.safetensors") if name not in ("lm_head.weight", f"{DOWN}.weight")
    ]
    weight_map = dict.fromkeys(names, "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        SpecError, match=rf"missing: {DOWN}.weight, lm_head.weight; the index leaves some out; remove it to read all"
    ):
        logits_of(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    check_equal(tmp_path, model)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_head_of_the_file_that_the_flag_denies(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vllm-project/vllm#51063, NVIDIA-NeMo/Automodel#2511"""
    written(tmp_path, family, tie_word_embeddings=False)
    edit(tmp_path, lambda tensors: None, tie_word_embeddings=True)
    check_equal(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path))
    assert "set tie_word_embeddings: false" in caplog.text


@pytest.mark.parametrize("names", [("model-00001-of-00002", "model-00002-of-00002"), ("consolidated",)], ids=str)
def test_files_without_an_index_are_all_read(names: tuple[str, ...], tmp_path: Path) -> None:
    """Blaizzy/mlx-vlm#1827, sgl-project/sglang#32279"""
    model = written(tmp_path)
    tensors = [*load_file(tmp_path / "model.safetensors").items()]
    (tmp_path / "model.safetensors").unlink()
    for number, name in enumerate(names):
        save_file(dict(tensors[number :: len(names)]), tmp_path / f"{name}.safetensors")
    check_equal(tmp_path, model)


def test_quantized_head_that_the_flag_denies(tmp_path: Path) -> None:
    model = random_model(tiny_config("llama", **SHAPE, tie_word_embeddings=False))
    write_quantised(tmp_path, model, "awq")
    edit(tmp_path, lambda tensors: None, tie_word_embeddings=True)
    check_equal(tmp_path, model)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("int8 channels", "compressed_tensors"),
        ("gptq", "GPTQ"),
        ("awq", "AWQ"),
        ("gptq_v2", "intel/auto-round"),
        ("gptq", "quantize_config.json"),
        ("awq", "quant_config.json"),
    ],
)
def test_older_names_and_places_of_the_quantization(kind: str, method: str, tmp_path: Path) -> None:
    """vLLM reads these as well. AutoGPTQ and AutoAWQ wrote their settings into files of their own at first."""
    model = random_model(tiny_config("llama", **SHAPE))
    write_quantised(tmp_path, model, kind)
    raw = json.loads((tmp_path / "config.json").read_text())
    if method.endswith(".json"):
        own = raw.pop("quantization_config")
        del own["quant_method"]
        if kind == "awq":
            own = {"zero_point": True, "q_group_size": own["group_size"], "w_bit": 4, "version": "GEMM"}
        (tmp_path / method).write_text(json.dumps(own))
    else:
        raw["quantization_config"]["quant_method"] = method
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check_equal(tmp_path, model)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_head_may_be_stored_under_either_name(kept: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = written(tmp_path, tie_word_embeddings=True)

    def rename(tensors: dict[str, Tensor]) -> None:
        table = tensors.pop("model.embed_tokens.weight")
        names = ("model.embed_tokens.weight", "lm_head.weight") if kept == "both" else (kept,)
        tensors.update({name: table.clone() for name in names})

    edit(tmp_path, rename)
    check_equal(tmp_path, model)
    assert "tie_word_embeddings" not in caplog.text


@pytest.mark.parametrize("flag", [False, None])
def test_missing_head_is_tied_with_a_warning(
    flag: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vllm-project/vllm#51665, QwenLM/Qwen3-VL-Embedding#89"""
    model = written(tmp_path, "qwen2", tie_word_embeddings=True)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight", None), tie_word_embeddings=flag)
    check_equal(tmp_path, model)
    assert "set tie_word_embeddings: true" in caplog.text
    caplog.clear()
    edit(tmp_path, lambda tensors: tensors.pop(f"{DOWN}.weight"))
    with pytest.raises(SpecError, match="missing: "):
        logits_of(tmp_path)
    assert "tie_word_embeddings" not in caplog.text


@pytest.mark.parametrize("kind", ["plain", "fp8 tensor", "fp8 blocks", "int8 channels"])
def test_scales_of_kv_and_activations_pass(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """sgl-project/sglang#1559, vllm-project/vllm#46264, vllm-project/llm-compressor#967, sgl-project/sglang#29530"""
    model = random_model(tiny_config("llama", **SHAPE))
    if kind == "plain":
        model.save_pretrained(tmp_path)
    else:
        write_quantised(tmp_path, model, kind)
    names = [
        *(
            f"{ATTENTION}.{name}"
            for name in ("k_scale", "v_scale", "kv_scale", "attn.k_scale", "q_scale", "prob_scale", "prob_output_scale")
        ),
        *(
            f"{ATTENTION}.{name}"
            for name in ("k_proj.k_scale", "v_proj.v_scale", "k_proj.k_bias", "k_proj.output_scale")
        ),
        *(f"{DOWN}.{name}" for name in ("input_scale", "input_zero_point", "output_scale")),
    ]
    zeros = [f"{DOWN}.weight_zero_point", f"{DOWN}.bias", f"{ATTENTION}.q_proj.bias"]
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}

    def add(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: torch.tensor(0.5) for name in names})
        tensors[f"{ATTENTION}.k_scale"] = torch.ones(2, 1, 1)  # strategy attn_head
        tensors.update({name: torch.zeros(64) for name in zeros} | inv_freq)

    edit(tmp_path, add)
    check_equal(tmp_path, model)
    assert f"not used, because KV and activations have their own scales: tensors {DOWN}.input_scale, " in caplog.text
    edit(tmp_path, lambda tensors: tensors.update({f"{DOWN}.bias": torch.ones(64)}))
    with pytest.raises(SpecError, match=rf"not expected: {DOWN}.bias; biases that are not zero need attention_bias or"):
        logits_of(tmp_path)


def test_tensors_outside_the_model_pass_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = written(tmp_path)
    tower = {"visual.blocks.0.weight": torch.ones(3), "score.weight": torch.ones(2), "model.layers.2.x": torch.ones(1)}
    edit(tmp_path, lambda tensors: tensors.update(tower))
    check_equal(tmp_path, model)
    assert "not part of the model, and not read: tensors model.layers.2.x, score.weight, visual.b" in caplog.text
    edit(tmp_path, lambda tensors: tensors.update({f"{ATTENTION}.q_norm.weight": torch.ones(16)}))
    with pytest.raises(SpecError, match=rf"not expected: {ATTENTION}.q_norm.weight"):
        logits_of(tmp_path)


def test_names_without_the_prefix_of_the_model(tmp_path: Path) -> None:
    """Embedding models are saved from the part below the head."""
    model = written(tmp_path, "qwen3", tie_word_embeddings=True)
    model.model.save_pretrained(tmp_path)
    assert "norm.weight" in load_file(tmp_path / "model.safetensors")
    edit(tmp_path, lambda tensors: None, architectures=["Qwen3ForCausalLM"])
    check_equal(tmp_path, model)


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("tiktoken.model", "TikTokenConverter('DIR/tiktoken.model', pattern=PAT_STR"),
        ("qwen.tiktoken", "TikTokenConverter('DIR/qwen.tiktoken', pattern=PAT_STR"),
        ("tokenizer.model", "AutoTokenizer.from_pretrained('DIR').save_pretrained('DIR')"),
    ],
)
def test_other_tokenizer_files_get_advice_that_works_for_them(file: str, advice: str, tmp_path: Path) -> None:
    """sgl-project/sglang#6523, keras-team/keras-hub#2468"""
    written(tmp_path)
    (tmp_path / file).touch()
    with pytest.raises(SpecError) as caught:
        resolve(str(tmp_path))
    assert advice in str(caught.value)


W = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))


def matrix(directory: Path, parts: dict[str, Tensor], **description: Any) -> Tensor:
    save_file({f"w.{suffix}": part.contiguous() for suffix, part in parts.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": description}))
    return open_checkpoint(directory).read("w.weight")


def mxfp8() -> tuple[dict[str, Tensor], Tensor]:
    exponents = W.view(64, 3, 32).abs().amax(-1).log2().floor().int() - 8
    scales = 2.0 ** exponents.repeat_interleave(32, 1)
    codes = (W / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": (exponents + 127).to(torch.uint8)}, codes.float() * scales


@pytest.mark.parametrize(
    "description",
    [
        {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"weights": {"group_size": 32, "scale_dtype": "torch.uint8"}}},
        },
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        {"quant_method": "fp8", "weight_block_size": [1, 32]},
    ],
    ids=str,
)
def test_byte_scales_are_exponents(description: dict[str, Any], tmp_path: Path) -> None:
    """Found while formats were checked: MXFP8, whose scales were read as plain numbers."""
    parts, numbers = mxfp8()
    if description["quant_method"] == "fp8":
        parts["weight_scale"] = parts["weight_scale"].view(torch.float8_e8m0fnu)
    assert torch.equal(matrix(tmp_path, parts, **description), numbers)


@pytest.mark.parametrize("block", ["32x16", [32, 16]])
def test_blocks_as_text(block: Any, tmp_path: Path) -> None:
    """Early files of compressed-tensors write block_structure as a text."""
    parts, numbers = fp8_blocks(W)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": block}
    parts["weight_scale"] = parts.pop("weight_scale_inv")
    found = matrix(tmp_path, parts, quant_method="compressed-tensors", config_groups={"g": {"weights": weights}})
    torch.testing.assert_close(found, numbers)


def test_asymmetric_int8_uses_its_zero_points(tmp_path: Path) -> None:
    low, high = W.amin(1, keepdim=True), W.amax(1, keepdim=True)
    scale = (high - low) / 255
    zeros = (-128 - low / scale).round().to(torch.int8)
    codes = (W / scale + zeros).round().clamp(-128, 127).to(torch.int8)
    parts = {"weight": codes, "weight_scale": scale, "weight_zero_point": zeros}
    found = matrix(tmp_path, parts, quant_method="compressed-tensors", format="int-quantized")
    torch.testing.assert_close(found, (codes.float() - zeros.float()) * scale)


@pytest.mark.parametrize("bits", [2, 8])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_gptq_with_other_bits(bits: int, is_dynamic: bool, tmp_path: Path) -> None:
    """vllm-project/vllm#15665, ModelCloud/GPTQModel#1485, sgl-project/sglang#3790"""
    generator = torch.Generator().manual_seed(0)
    codes, zeros = (torch.randint(0, 1 << bits, size, generator=generator) for size in ((64, 96), (64, 6)))
    scales = torch.rand(64, 6, generator=generator).half()

    def pack(x: Tensor) -> Tensor:
        """Pack along the last dimension. -1 borrows from the next number, as in GPTQModel."""
        words = (torch.unflatten(x.long(), 1, (-1, 32 // bits)) << torch.arange(32 // bits) * bits).sum(-1)
        return words.where(words < 1 << 31, words - (1 << 32)).int()

    parts = {"qweight": pack(codes).T, "qzeros": pack((zeros - 1).T), "scales": scales.T}
    description: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": 16}
    if is_dynamic:
        description |= {"bits": 4, "dynamic": {"-:lm_head": {}, r"+:w$": {"bits": bits}}}
    expected = (codes - zeros.repeat_interleave(16, 1)) * scales.float().repeat_interleave(16, 1)
    torch.testing.assert_close(matrix(tmp_path, parts, **description), expected)


def test_packed_four_bits_of_compressed_tensors(tmp_path: Path) -> None:
    """vllm-project/vllm#7086"""
    codes, scales = torch.randint(0, 16, (64, 96)), torch.rand(64, 6)
    words = (codes.unflatten(1, (-1, 8)) << torch.arange(8) * 4).sum(-1)
    parts = {
        "weight_packed": words.where(words < 1 << 31, words - (1 << 32)).int(),
        "weight_scale": scales,
        "weight_shape": torch.tensor((64, 96)),
    }
    found = matrix(tmp_path, parts, quant_method="compressed-tensors", format="pack-quantized")
    torch.testing.assert_close(found, (codes - 8) * scales.repeat_interleave(16, 1))


def test_gptq_with_bits_in_planes_is_refused(tmp_path: Path) -> None:
    """GPTQModel stores 5, 6 and 7 bits unlike auto-round, in tensors of equal shapes."""
    parts = {"qweight": torch.zeros(15, 64).int(), "qzeros": torch.zeros(6, 10).int(), "scales": torch.ones(6, 64)}
    with pytest.raises(SpecError, match=r"^w.qweight: codes of 5 bits are not supported"):
        matrix(tmp_path, parts, quant_method="gptq", bits=5, group_size=16)


@pytest.mark.parametrize(
    ("parts", "description", "complaint"),
    [
        ({"weight_scale": torch.ones(64, 1, dtype=torch.int8)}, {}, r"w.weight \(F8_E4M3\) with w.weight_scale \(I8\)"),
        ({"weight_scale": torch.full((64, 1), torch.nan)}, {}, "w.weight_scale has a scale that is not a finite"),
        ({"weight_scale": torch.full((64, 3), 255).byte()}, {}, "w.weight_scale has a scale that is not a finite"),
        ({"weight_scale": torch.ones(64, 7)}, {}, r"w.weight_scale: scales of shape \(64, 7\) do not fit 64 outputs"),
        ({"weight": W.bfloat16()}, {}, r"w.weight \(BF16\) with w.weight_scale \(F32\) is in no supported format"),
        ({"weight": W.byte()}, {}, r"w.weight_scale: scales of shape \(64, 1\) do not fit 128 outputs and 96 inputs"),
        ({"weight_scale": None}, {}, r"w.weight \(F8_E4M3\) has no scales beside it"),
        (
            {"weight_zero_point": torch.ones(3)},
            {},
            r"w.weight_zero_point with shape \(3,\) does not match the scales of",
        ),
        ({"weight_g_idx": torch.full((96,), 5)}, {}, "w.weight_g_idx does not match 96 inputs in 1 groups"),
        ({"weight_packed": W.byte(), "weight": None}, {}, r"w.weight_packed \(U8\) with w.weight_scale \(F32\) is in"),
        (
            {"weight": W.byte(), "weight_scale": torch.ones(64, 12).byte()},
            {},
            r"scales of shape \(64, 12\) do not fit 64",
        ),
        (
            {},
            {"format": "mxfp6-pack-quantized"},
            "compressed-tensors with format mxfp6-pack-quantized is not supported",
        ),
        ({}, {"config_groups": {"g": {"format": "marlin-24"}}}, "compressed-tensors with format marlin-24 is not"),
        ({}, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt with quant_algo W4A8_AWQ is not supp"),
        ({}, {"quant_method": "auto-round", "data_type": "mx_int4"}, "auto-round with data_type mx_int4 is not supp"),
        (
            {},
            {"quant_method": "awq", "version": "exllama"},
            "awq with version exllama is not supported; supported: gemm",
        ),
        ({}, {"quant_method": "gptq", "checkpoint_format": "marlin"}, "gptq with checkpoint_format marlin is not supp"),
        (
            {},
            {"quant_method": "fp8", "weight_block_size": [0, 0]},
            r"weight_block_size is \[0, 0\], and must be numbers",
        ),
        ({}, None, "w.weight has dtype F8_E4M3, and config.json has no quantization_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_not_understood_is_refused(
    parts: dict[str, Tensor | None], description: dict[str, Any] | None, complaint: str, tmp_path: Path
) -> None:
    tensors = {name: part for name, part in (fp8_channels(W)[0] | parts).items() if part is not None}
    settings = {} if description is None else {"quant_method": "compressed-tensors"} | description
    with pytest.raises(SpecError, match=complaint):
        matrix(tmp_path, tensors, **settings)


def test_modelopt_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    parts, numbers = int8_channels(W)[0] | fp8_channels(W)[0], fp8_channels(W)[1]
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    torch.testing.assert_close(matrix(tmp_path, parts), numbers)
