"""params.json of Mistral's own format: published ones are read, odd ones give one line with the key's own name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.model import config as model_config
from core.model.shape import ModelConfig
from core.types.errors import SpecError
from tests.core.model.test_config import LLAMA

_YARN = {"original_max_position_embeddings": 16384, "factor": 16, "apply_scale": False, "beta": 32, "alpha": 1}
_SCALING = {"original_max_position_embeddings": 16384, "beta": 0.1}
_VISION = {"hidden_size": 1024, "num_hidden_layers": 24, "image_token_id": 10, "mm_projector_id": "patch_merge"}
NEMO: dict[str, Any] = {
    "dim": 5120,
    "n_layers": 40,
    "head_dim": 128,
    "hidden_dim": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-05,
    "vocab_size": 131072,
    "rope_theta": 1000000.0,
}
# Keys of other kinds of attention are null, as in published files.
MINISTRAL3 = NEMO | {
    "tied_embeddings": True,
    "max_position_embeddings": 262144,
    "llama_4_scaling": _SCALING,
    "yarn": _YARN,
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    "vision_encoder": _VISION,
    "sliding_window": None,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "moe")),
}
LARGE3 = MINISTRAL3 | {
    "dim": 7168,
    "n_layers": 61,
    "n_heads": 128,
    "n_kv_heads": 128,
    "hidden_dim": 16384,
    "tied_embeddings": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe": {
        "expert_parallel": 1,
        "expert_model_parallel": 1,
        "route_every_n": 1,
        "first_k_dense_replace": 3,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "num_expert_groups": 1,
        "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0,
        "expert_hidden_dim": 4096,
        "num_shared_experts": 1,
    },
}
MIXTRAL = NEMO | {"moe": {"num_experts_per_tok": 2, "num_experts": 8}, "max_seq_len": 65536}


def read(directory: Path, params: object) -> ModelConfig:
    (directory / "params.json").write_text(params if isinstance(params, str) else json.dumps(params))
    return model_config.load(directory)


def test_published_models(tmp_path: Path) -> None:
    nemo = read(tmp_path, NEMO | {"max_batch_size": 8, "causal": True, "use_biases": False})
    assert (nemo.architecture, nemo.max_context, nemo.eos_token_ids) == ("MistralForCausalLM", 128_000, (2,))
    assert not nemo.tie_embeddings and nemo.layers[0].window is None and nemo.ropes[0].kind == "default"
    assert model_config.quantization_config(tmp_path) == {}
    ministral = read(tmp_path, MINISTRAL3)
    assert ministral.architecture == "Ministral3ForCausalLM" and ministral.max_context == 262144
    assert ministral.tie_embeddings and ministral.query_scaling and ministral.query_scaling.interval == 16384
    assert ministral.ropes[0].attention_factor == 1 and ministral.ropes[0].beta_fast == 32
    fp8 = {"quant_method": "fp8", "activation_scheme": "static"}
    assert model_config.quantization_config(tmp_path) == fp8
    large = read(tmp_path, LARGE3)
    assert large.latent and large.latent.latent_dim == 512 and large.attention_scale(0) == pytest.approx(192**-0.5)
    assert large.experts and large.experts.num_experts == 128 and large.experts.shared_size == 4096
    assert [large.is_sparse(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]
    assert large.num_parameters == pytest.approx(673e9, rel=0.01), "675 billion, with the image encoder"
    mixtral = read(tmp_path, MIXTRAL)
    assert mixtral.experts and mixtral.experts.intermediate_size == 14336 and mixtral.max_context == 65536


def test_latents_without_a_key_have_none_of_it(tmp_path: Path) -> None:
    """The family's defaults are those of Mistral Small 4."""
    for absent in ({}, {"q_lora_rank": None, "moe": None}):
        params = {name: value for name, value in LARGE3.items() if name not in ("q_lora_rank", "moe")} | absent
        dense = read(tmp_path, params)
        assert dense.latent and dense.latent.query_dim is None and dense.experts is None


@pytest.mark.parametrize(
    ("window", "expected"),
    [(4096, 4096), ("4096", 4096), ([32768, None], None), ([1024], 1024), (None, None)],
)
def test_windows(window: Any, expected: int | None, tmp_path: Path) -> None:
    for key in ("sliding_window", "_sliding_window"):
        params = NEMO | {"max_position_embeddings": 32768, key: window}
        assert read(tmp_path, params).layers[0].window == expected


def test_config_json_comes_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read(tmp_path, "{").architecture == "LlamaForCausalLM"


def _without(params: dict[str, Any], key: str, inside: str = "") -> dict[str, Any]:
    if inside:
        return params | {inside: _without(params[inside], key)}
    return {name: value for name, value in params.items() if name != key}


_REQUIRED = [(NEMO, key, "") for key in NEMO] + [
    *((MINISTRAL3, key, "yarn") for key in _without(_YARN, "apply_scale")),
    *((MINISTRAL3, key, "llama_4_scaling") for key in _SCALING),
    *((LARGE3, key, "") for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")),
    *((LARGE3, key, "moe") for key in ("num_experts", "num_experts_per_tok", "num_shared_experts")),
    *((LARGE3, key, "moe") for key in ("expert_hidden_dim", "first_k_dense_replace")),
    *((MIXTRAL, key, "moe") for key in ("num_experts", "num_experts_per_tok")),
]


@pytest.mark.parametrize(
    ("params", "key", "inside"), _REQUIRED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_missing_key_names_itself(params: dict[str, Any], key: str, inside: str, tmp_path: Path) -> None:
    named = f"{inside}.{key}" if inside else key
    for wrong in (_without(params, key, inside), _with(params, key, inside, None)):
        with pytest.raises(SpecError) as caught:
            read(tmp_path, wrong)
        assert str(caught.value) == f"{tmp_path / 'params.json'}: {named} is missing"


def _with(params: dict[str, Any], key: str, inside: str, value: object) -> dict[str, Any]:
    return params | ({inside: params[inside] | {key: value}} if inside else {key: value})


_NUMBERS = [
    *((MINISTRAL3, key, "") for key in (*NEMO, "max_position_embeddings", "sliding_window")),
    *((LARGE3, key, "") for key in ("dim", "n_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")),
    *((LARGE3, key, "") for key in ("qk_nope_head_dim", "v_head_dim")),
    *((MINISTRAL3, key, "yarn") for key in _without(_YARN, "apply_scale")),
    *((MINISTRAL3, key, "llama_4_scaling") for key in _SCALING),
    *((LARGE3, key, "moe") for key in _without(LARGE3["moe"], "expert_parallel") if key != "expert_model_parallel"),
    *((MIXTRAL, key, "moe") for key in MIXTRAL["moe"]),
]
_REALS = ("norm_eps", "rope_theta", "beta", "alpha", "routed_scale")
_ODD = (-3, "x", "12", [], [[3]], {"a": 1}, True, -0.5, 1e400, float("nan"), "\n", 10**40)


@pytest.mark.parametrize(
    ("params", "key", "inside"), _NUMBERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_odd_number_gives_one_line(params: dict[str, Any], key: str, inside: str, tmp_path: Path) -> None:
    for value in _ODD:
        if (key, value) == ("sliding_window", "12") or (key in _REALS and value == 10**40):
            continue  # some files have the window as a string
        with pytest.raises(SpecError) as caught:
            read(tmp_path, _with(params, key, inside, value))
        message = str(caught.value)
        assert message.startswith(f"{tmp_path / 'params.json'}: ") and "\n" not in message and len(message) < 400
        assert key in message or "rotates" in message, f"{value!r}: {message}"


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        (NEMO | {"n_layers": 1 << 31}, "n_layers is 2147483648, and must be a whole number from 1 to 4096"),
        (NEMO | {"n_kv_heads": 5}, "n_heads is 32, and must be a multiple of the 5 n_kv_heads of layer 0"),
        (NEMO | {"moe": 5}, "moe is 5, and must be a JSON object"),
        (NEMO | {"yarn": [1]}, "yarn is [1], and must be a JSON object"),
        (NEMO | {"vision_encoder": "pixtral"}, "vision_encoder is 'pixtral', and must be a JSON object"),
        (NEMO | {"multimodal": {"whisper_model_args": {"dim": 1}}}, "multimodal.whisper_model_args {'dim': 1} is not"),
        (NEMO | {"tied_embeddings": "yes"}, "tied_embeddings is 'yes', and must be true or false"),
        (NEMO | {"activation": "relu"}, "activation relu is not supported; supported: silu"),
        (NEMO | {"activation": "a\nb"}, "activation a b is not supported; supported: silu"),
        (NEMO | {"a\nb": [1]}, "a b [1] is not supported, and may change the results"),
        (NEMO | {"model_type": "mamba"}, "model_type mamba is not supported; supported: transformer"),
        (NEMO | {"qk_norm": True}, "qk_norm True is not supported, and may change the results"),
        (NEMO | {"llama_4_scaling": _SCALING, "moe": MIXTRAL["moe"]}, "llama_4_scaling {'original_max_position"),
        (NEMO | {"sliding_window": [None, 4096]}, "sliding_window [None, 4096] is not supported: all layers must have"),
        (LARGE3 | {"sliding_window": 4096}, "sliding_window 4096 is not supported, and may change the results"),
        (_with(MINISTRAL3, "mscale", "yarn", 0.7), "yarn.mscale 0.7 is not supported, and may change the results"),
        (_with(MINISTRAL3, "apply_scale", "yarn", 2), "yarn.apply_scale is 2, and must be true or false"),
        (_with(MINISTRAL3, "original_max_position_embeddings", "llama_4_scaling", 8192),
         "llama_4_scaling.original_max_position_embeddings is 8192, and must be yarn's, 16384"),
        (_with(LARGE3, "num_experts_per_tok", "moe", 129),
         "moe.num_experts_per_tok is 129, and must be a whole number"),
        (_with(LARGE3, "num_expert_groups", "moe", 8),
         "moe.num_expert_groups is 8, and must be a whole number from 1 to 1"),
        (_with(LARGE3, "route_every_n", "moe", 2), "moe.route_every_n is 2, and must be a whole number from 1 to 1"),
        (_with(MIXTRAL, "num_shared_experts", "moe", 2), "moe.num_shared_experts 2 is not supported, and may change"),
        (NEMO | {"quantization": {"qformat_weight": "int4"}},
         "quantization.qformat_weight int4 is not supported; supp"),
        (NEMO | {"quantization": {"bits": 4}}, "quantization.qformat_weight (none) is not supported; supported: fp8"),
        (NEMO | {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "CHANNEL"}},
         "quantization.qscheme_act CHANNEL is not supported; supported: TENSOR, NO_SCALES"),
        (NEMO | {"quantization": {"quant_method": "hqq"}}, "weights quantized by hqq are not supported"),
        (NEMO | {"quantization": {"quant_method": ["x"]}}, "weights quantized by ['x'] are not supported"),
        ("[]", "not a JSON object"),
        ("{", "not readable as JSON"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_supported_is_named(params: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, params)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'params.json'}: {complaint}") and "\n" not in message
