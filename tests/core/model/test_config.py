"""Parsing and validation of config.json and generation_config.json; and the division of a replica's KV memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.model import config as model_config
from core.model.gguf_file import StoredTensor, write_table
from core.model.kv_memory import CacheShape, WindowArithmetic, state_slots_for
from core.types.errors import SpecError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 100,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def write(directory: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    config = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def write_no_weights(directory: Path) -> None:
    """Write a valid safetensors file without tensors."""
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    config = model_config.load(write(tmp_path, hidden_size=75, head_dim=..., num_key_value_heads=...))
    assert (config.num_kv_heads, config.head_dim, config.ropes[0].theta, config.rms_norm_eps) == (12, 6, 10000.0, 1e-6)
    assert not config.tie_embeddings and not config.has_qkv_bias
    assert [layer.window for layer in config.layers] == [None, None] and config.max_context == 2048
    assert model_config.load(write(tmp_path, rms_norm_eps=None, hidden_act=None)).rms_norm_eps == 1e-6
    assert model_config.load(write(tmp_path, architectures="LlamaForCausalLM")).architecture == "LlamaForCausalLM"
    assert model_config.load(write(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=...)).head_dim == 128


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    assert model_config.load(write(tmp_path)).eos_token_ids == (2,)
    assert model_config.load(write(tmp_path, generation={"eos_token_id": [7, 8]})).eos_token_ids == (7, 8)
    assert model_config.load(write(tmp_path, generation={"eos_token_id": None})).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("settings", "kind", "max_context"),
    [
        ({"rope_scaling": None, "rope_theta": 5e5}, "default", 2048),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "default", 2048),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}, "linear", 8192),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 2.0}}, "dynamic", 4096),
        ({"rope_theta": 5e5, "rope_scaling": _LLAMA3}, "llama3", 2048),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
         "yarn", 4096),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}, "yarn", 8192),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
          "rope_scaling": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}, "yarn", 8192),
    ],
)  # fmt: skip
def test_rope_settings_in_both_forms(settings: dict[str, Any], kind: str, max_context: int, tmp_path: Path) -> None:
    config = model_config.load(write(tmp_path, **settings))
    assert (config.ropes[0].kind, config.max_context, config.ropes[0].theta) == (kind, max_context, 5e5)


def test_rope_scaling_that_loses_the_theta_is_refused(tmp_path: Path) -> None:
    """transformers would compute with its default of 10,000."""
    parameters = {"rope_type": "default", "rope_theta": 5e5}
    write(tmp_path, rope_parameters=parameters, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with pytest.raises(SpecError, match=r"its rope_theta of 500000.0 would be lost; set rope_theta in rope_scaling"):
        model_config.load(tmp_path)


@pytest.mark.parametrize("listed", [..., None, []], ids=str)
@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM"), ("mistral", "MistralForCausalLM")],
)
def test_model_type_stands_for_a_missing_architecture(
    listed: Any, model_type: str, architecture: str, tmp_path: Path
) -> None:
    assert model_config.load(write(tmp_path, architectures=listed, model_type=model_type)).architecture == architecture
    with pytest.raises(SpecError, match=r"architecture \(none\) is not supported"):
        model_config.load(write(tmp_path, architectures=listed))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9, 9)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 9}, (None, None)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": False}, (None, None)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "use_sliding_window": True,
         "max_window_layers": 1}, (None, 9)),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 9, "use_sliding_window": True,
         "layer_types": ["sliding_attention", "full_attention"]}, (9, None)),
    ],
)  # fmt: skip
def test_sliding_windows(changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert tuple(layer.window for layer in model_config.load(write(tmp_path, **changes)).layers) == windows


def test_layers_of_kv_in_the_models_dtype(tmp_path: Path) -> None:
    config = model_config.load(write(tmp_path))
    last = config.num_layers - 1
    assert config.layers_at("kv.unquantized_layers", [-1, 0, last]) == (0, last)
    for index in (config.num_layers, -config.num_layers - 1):
        with pytest.raises(SpecError, match=rf"kv.unquantized_layers: layer {index} is out of range"):
            config.layers_at("kv.unquantized_layers", [index])


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv"] * 2},
        {"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [2]},
        {"architectures": ["Qwen3_5ForCausalLM"]},  # of every four layers, the last has attention
    ],
)
def test_a_model_without_attention_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no layer has attention; at least one must"):
        model_config.load(write(tmp_path, **changes))


def test_tensor_parallel_sizes(tmp_path: Path) -> None:
    config = model_config.load(write(tmp_path))  # 12 query heads, 4 kv heads
    assert config.tensor_parallel_choices() == [1, 2, 4, 12]
    config.check_tensor_parallel(12)
    with pytest.raises(SpecError, match=r"tensor_parallel: 3 does not fit 12 query and 4 KV heads; .* 1, 2, 4, 12"):
        config.check_tensor_parallel(3)
    smollm2 = model_config.load(write(tmp_path, num_attention_heads=9, num_key_value_heads=3))
    assert smollm2.tensor_parallel_choices() == [1, 3, 9]


def test_unlike_layers_with_kv(tmp_path: Path) -> None:
    """Every layer's KV heads divide or are replicated; a layer that reads another one's KV does not count."""
    alike = model_config.load(write(tmp_path))
    assert alike.kv_layers == ((4, 8), (4, 8))
    heads = ((6, 8), (4, 16), (4, 16), (5, 6))
    layers = tuple(replace(alike.layers[0], num_kv_heads=num_heads, head_dim=dim) for num_heads, dim in heads)
    config = replace(alike, num_layers=4, layers=(*layers[:3], replace(layers[3], kv_layer=1)))
    assert [config.pool_layer(index) for index in range(4)] == [0, 1, 2, 1]
    assert config.kv_layers == ((6, 8), (4, 16), (4, 16))
    assert config.tensor_parallel_choices() == [1, 2, 12]
    with pytest.raises(SpecError, match=r"tensor_parallel: 4 does not fit 12 query and 4 or 6 KV heads; .* 1, 2, 12"):
        config.check_tensor_parallel(4)
    assert config.layers_at("kv.unquantized_layers", [-1, 0]) == (0, 2)
    with pytest.raises(SpecError, match=r"layer 3 is out of range \[-3, 3\)"):
        config.layers_at("kv.unquantized_layers", [3])
    config.check_kv_dtype("kv.pool_dtype", "int4")
    with pytest.raises(SpecError, match="int4 is not possible, because LlamaForCausalLM has a head_dim of 6"):
        replace(config, layers=layers).check_kv_dtype("kv.pool_dtype", "int4")


def test_sizes(tmp_path: Path) -> None:
    config = model_config.load(write(tmp_path, tie_word_embeddings=True))
    layer = 64 * 8 * (12 + 4 + 4) + 12 * 8 * 64 + 3 * 64 * 160 + 2 * 64
    assert config.num_parameters == 2 * layer + 100 * 64 + 64


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, "),
        ({"architectures": ...}, "architecture (none) is not supported"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_act": "relu2"}, "hidden_act relu2 is not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized by hqq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.short_factor is missing"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "type mrope is not supported; supported: default, "),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported for LlamaForCausalLM"),
        ({"use_qk_norm": True}, "use_qk_norm True is not supported for LlamaForCausalLM, and changes its results"),
        ({"layers_block_type": ["mamba", "attention"]}, "layers_block_type ['mamba', 'attention'] is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": _LLAMA3 | {"factor": None}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": _LLAMA3 | {"low_freq_factor": None}}, "rope_scaling.low_freq_factor is missing"),
        ({"rope_scaling": _LLAMA3 | {"high_freq_factor": None}}, "rope_scaling.high_freq_factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per kind of layer (full_attention)"),
        ({"rope_parameters": ["yarn"]}, "rope_parameters is ['yarn'], and must be a JSON object"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "x"}}, "beta_fast is 'x'"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8', and must be a JSON object"),
        ({"attention_bias": "false"}, "attention_bias is 'false', and must be true or false"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"eos_token_id": "2"}, "eos_token_id (generation_config.json comes first) is '2'"),
        ({"eos_token_id": [1, [2]]}, "is [2], and must be a token id"),
        ({"eos_token_id": -1}, "is -1, and must be a token id"),
        ({"num_attention_heads": 0, "head_dim": ...}, "num_attention_heads is 0, and must be a whole number from 1"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers is 1073741824, and must be a whole number from 1 to 4096"),
        ({"num_attention_heads": 1 << 30}, "num_attention_heads is 1073741824, and must be a whole number"),
        ({"num_key_value_heads": 5}, "num_attention_heads is 12, and must be a multiple of the 5 num_key_value_heads"),
        ({"head_dim": 15}, "head_dim 15 rotates 15 features, which must be an even number from 2"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is not supported; supported: silu"),
        ({"architectures": 5}, "architectures is 5, and must be a name"),
        ({"architectures": {"a": 1}}, "architectures is {'a': 1}, and must be a name"),
        ({"architectures": None, "model_type": ["llama"]}, "model_type is ['llama'], and must be a name"),
        ({"text_config": [{}]}, "text_config is [{}], and must be a JSON object"),
        ({"text_config": {"model_type": ["llama"]}}, "model_type is ['llama'], and must be a name"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type ['yarn'] is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}}, "yarn has rope_theta 1.0"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": float("nan")}}, "mscale is nan"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e308}}, "rope type linear has factor 1e+308"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 1e-9}}, "rope type linear has factor 1e-09"),
        ({"rope_parameters": _LLAMA3 | {"low_freq_factor": 5.0}}, "llama3 has low_freq_factor 5.0, and must have at"),
        ({"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic rotates 2 features"),
    ],
)
def test_unsupported_config_is_one_line(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        model_config.load(write(tmp_path, **changes))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


def test_unreadable_config(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        model_config.load(tmp_path)
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SpecError, match="not"):
            model_config.load(tmp_path)


def test_fingerprint_depends_on_the_weights(tmp_path: Path) -> None:
    def fingerprint_of(name: str, content: bytes, **changes: Any) -> str:
        (tmp_path / name).mkdir()
        write(tmp_path / name, **changes)
        (tmp_path / name / "model.safetensors").write_bytes(content)
        return model_config.fingerprint(tmp_path / name)

    weights = bytes(range(256)) * 4000
    first = fingerprint_of("a", weights)
    assert fingerprint_of("b", weights) == first  # independent of the path
    assert fingerprint_of("c", weights + b"x") != first
    assert fingerprint_of("d", weights[:-1] + b"x") != first
    assert fingerprint_of("e", weights, rope_theta=3.0) != first
    index = tmp_path / "a" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    indexed = model_config.fingerprint(tmp_path / "a")
    index.write_text(json.dumps({"weight_map": {"y": "model.safetensors"}}))
    assert len({first, indexed, model_config.fingerprint(tmp_path / "a")}) == 3


def test_gguf_fingerprint_is_independent_of_the_path(tmp_path: Path) -> None:
    found = []
    for name in ("here", "there"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / f"{name}.gguf").write_bytes(b"weights")
        tensor = StoredTensor(name="w", ggml_type=0, shape=(1,), file=str(directory / f"{name}.gguf"), offset=0)
        write_table(write(directory), [tensor])
        found.append(model_config.fingerprint(directory))
    assert found[0] == found[1]


_MIB = 1 << 20


@pytest.mark.parametrize(
    ("memory_mib", "state_bytes", "token_bytes", "expected"),
    [
        (40 * 1024, 64 * _MIB, 20 << 10, 284),  # one per 4,096 tokens
        (16 * 1024, 64 * _MIB, 20 << 10, 128),  # at most half of the memory
        (20 * 1024, 64 * _MIB, 64 << 10, 128),  # two per running sequence
        (1024, 64 << 10, 4 << 10, 512),  # a 32nd of the memory
        (100, 64 * _MIB, 20 << 10, 2),
    ],
)
def test_state_slots(memory_mib: int, state_bytes: int, token_bytes: int, expected: int) -> None:
    slots = state_slots_for(memory_mib * _MIB, state_bytes, token_bytes=token_bytes, max_running=64)
    assert slots == expected


@pytest.mark.parametrize(
    ("memory_mib", "of_1k", "of_8k", "longest"),
    [
        (512, 20, 8, 0),  # cannot hold the largest context: half of the memory
        (780, 21, 16, 1),  # the largest context, and what is left
        (1024, 42, 16, 1),
        (16 * 1024, 128, 128, 29),  # parts for all running sequences, and for as many prefixes
    ],
)
def test_parts_of_short_sequences(memory_mib: int, of_1k: int, of_8k: int, longest: int) -> None:
    """A model with a long context, like Gemma 3: a short sequence needs as many parts as a long one."""
    windows = WindowArithmetic(window=512, block_size=16, max_context=128 << 10, max_batch_tokens=512)
    cache = CacheShape(block_size=16, token_bytes=26 << 10, window_token_bytes=22 << 10, window=512)
    sizes = cache.pool_sizes(memory_mib * _MIB, max_running=64, windows=windows)
    found = [sizes.max_batch(cache, context << 10, max_batch_tokens=512) for context in (1, 8, 128)]
    assert found == [of_1k, of_8k, longest]
    assert sizes.num_window_parts
    num_bytes = 16 * (sizes.num_blocks * (4 << 10) + sizes.num_window_parts * (22 << 10))
    assert num_bytes <= memory_mib * _MIB < num_bytes + cache.block_bytes
