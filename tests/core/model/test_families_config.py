"""Settings of single model families and of Mistral's own format: what cannot be computed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.model import config as model_config
from core.model.config import parse
from core.model.shape import ModelConfig
from core.types.errors import SpecError
from tests.core.model.test_config import LLAMA

_SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2}
_LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_KINDS = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
_GEMMA4 = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20}
_GEMMA4 |= {"layer_types": _KINDS}
_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "MixtralForCausalLM": _LOCAL,
    "Qwen3MoeForCausalLM": _QWEN,
    "DeepseekV2ForCausalLM": _ROUTED | _LATENT | {"topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": _ROUTED | _LATENT,
    "DeepseekV32ForCausalLM": _ROUTED | _LATENT,
    "GlmMoeDsaForCausalLM": _ROUTED | _LATENT,
    "Glm4MoeForCausalLM": _ROUTED,
    "Mistral4ForCausalLM": _ROUTED | _LATENT | {"n_group": 1, "topk_group": 1},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "Gemma4ForCausalLM": _GEMMA4,
    "Phi3ForCausalLM": {},
    "GptOssForCausalLM": _LOCAL,
    "MiniMaxM2ForCausalLM": _LOCAL,
    "Llama4ForCausalLM": {"num_local_experts": 6},
    "GraniteMoeHybridForCausalLM": _LOCAL | {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4},
    "Qwen3NextForCausalLM": {},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-*E", "n_routed_experts": 8},
}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize("architecture", _FAMILIES)
def test_a_family_reads_these_settings(architecture: str) -> None:
    parse({"architectures": [architecture], **_SIZES, **_FAMILIES[architecture]}, Path("config.json"))


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        ("Mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, and must be a whole number from 1 to 6"),
        ("Gemma4", {"top_k_experts": 7}, "top_k_experts is 7, and must be a whole number from 1 to 6"),
        ("Qwen3Moe", {"num_experts": 1 << 30}, "num_experts is 1073741824, and must be a whole number from 1 to 4096"),
        ("Qwen3Moe", {"num_experts": 4096, "num_hidden_layers": 4096}, "4096 layers of 4096 experts exceed 262144"),
        ("DeepseekV3", {"n_group": 3}, "n_group 3 and topk_group 2 do not fit 8 n_routed_experts"),
        ("DeepseekV3", {"n_group": 8}, "groups need one size, at least 2 experts each"),
        ("DeepseekV3", {"topk_group": 1}, "do not fit 8 n_routed_experts and 3 num_experts_per_tok"),
        ("DeepseekV2", {"topk_group": 5}, "topk_group is 5, and must be a whole number from 1 to 4"),
        ("DeepseekV32", {"q_lora_rank": None}, "q_lora_rank is missing"),
        ("DeepseekV32", {"index_head_dim": 7}, "index_head_dim is 7, and must be a whole number from 8"),
        ("DeepseekV32", {"index_topk": 0}, "index_topk is 0, and must be a whole number from 1"),
        ("DeepseekV32", {"index_topk_freq": 4}, "index_topk_freq 4 is not supported for DeepseekV32ForCausalLM"),
        ("DeepseekV3", {"index_topk": 2048}, "index_topk 2048 is not supported for DeepseekV3ForCausalLM"),
        ("GlmMoeDsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave false is not supported"),
        ("GlmMoeDsa", {"index_topk_pattern": "FXFF"}, "index_topk_pattern X of layer 1 is not supported"),
        ("GlmMoeDsa", {"indexer_types": ["full"]}, "indexer_types must be a list of 4 values"),
        ("GlmMoeDsa", {"index_topk_pattern": "SFFF"}, "layer 0 shares the positions of an earlier layer"),
        # transformers ranks its groups as those of sigmoid scores.
        ("Mistral4", {"n_group": 2}, "n_group 2 is not supported for Mistral 4"),
        ("Glm4Moe", {"mlp_layer_types": ["dense", "Sparse"] * 2}, "mlp_layer_types Sparse of layer 1 is not supported"),
        ("Glm4Moe", {"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01 of head_dim 16 rotates 0 features"),
        ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func softmax is not supported; supported: sigmoid"),
        ("MiniMaxM2", {"scoring_func": "softmax"}, "scoring_func softmax is not supported; supported: sigmoid"),
        ("DeepseekV3", {"qk_rope_head_dim": 7}, "rotates 7 features"),
        ("DeepseekV3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("Qwen3Moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers is ['1'], and must be a list of layers"),
        ("Llama4", {"moe_layers": [-1]}, "moe_layers is [-1], and must be a list of layers"),
        ("Llama4", {"no_rope_layers": ["a"] * 4}, "no_rope_layers a of layer 0 is not supported; supported: 1, 0"),
        ("Llama4", {"layer_types": _KINDS}, "layer_types sliding_attention of layer 0 is not supported"),
        ("Gemma3", {"layer_types": ["full"] * 4}, "layer_types full of layer 0 is not supported"),
        ("Gemma2", {"layer_types": [[1]] * 4}, "layer_types [1] of layer 0 is not supported"),
        ("Gemma2", {"sliding_window": 0}, "sliding_window is 0, and must be a whole number from 1"),
        ("Qwen2", {"max_window_layers": "x"}, "max_window_layers is 'x', and must be a whole number"),
        ("Gemma3", {"rope_parameters": {"full_attention": 3}}, "full_attention is 3, and must be a JSON object"),
        ("Gemma4", {"rope_parameters": {"full_attention": [1]}}, "full_attention is [1], and must be a JSON object"),
        ("Gemma4", {"per_layer_config": []}, "per_layer_config is [], and must be a JSON object"),
        ("Gemma4", {"per_layer_config": {"²": {}}}, "per_layer_config: layer '²' is not one of the 4 layers"),
        ("Gemma4", {"per_layer_config": {"2": {"head_dim": 32}}}, "head_dim [16, 32] of full_attention layers"),
        ("Gemma4", {"per_layer_config": {"3": {"num_key_value_heads": 4}}, "num_kv_shared_layers": 1},
         "layer 3 shares keys and values with layer 2, which has other heads"),
        ("Gemma4", {"num_global_key_value_heads": "3", "attention_k_eq_v": True},
         "num_global_key_value_heads is '3', and must be a whole number"),
        ("Gemma4", {"num_global_key_value_heads": 3, "attention_k_eq_v": True},
         "must be a multiple of the 3 num_key_value_heads of layer 2"),
        ("Phi3", {"rope_scaling": _LONGROPE | {"original_max_position_embeddings": 1}},
         "rope type longrope has original_max_position_embeddings 1.0, and must have at least 2"),
        ("NemotronH", {"hybrid_override_pattern": "M-*e"}, "hybrid_override_pattern 'M-*e'; one must give the kind"),
        ("NemotronH", {"hybrid_override_pattern": "M-E"}, "no layer has attention; at least one must have it"),
        ("NemotronH", {"layers_block_type": ["mlp", "rwkv"]}, "layers_block_type rwkv of layer 1 is not supported"),
        ("NemotronH", {"time_step_limit": [0.1, 0.0]}, "time_step_limit is [0.1, 0.0], and must be two numbers from 0"),
        ("NemotronH", {"time_step_limit": [0.1, "1"]}, "time_step_limit is [0.1, '1'], and must be two numbers from 0"),
        ("NemotronH", {"mlp_hidden_act": "silu"}, "mlp_hidden_act silu is not supported; supported: relu2"),
        ("NemotronH", {"mlp_bias": True}, "mlp_bias true is not supported beside experts"),
        ("Qwen3Next", {"hidden_act": "gelu"}, "hidden_act gelu is not supported; supported: silu, swish"),
        ("GraniteMoeHybrid", {"hidden_act": "gelu"}, "hidden_act gelu is not supported; supported: silu, swish"),
        ("NemotronH", {"n_groups": 3}, "mamba_num_heads 128 is not a multiple of n_groups 3"),
        ("Phi3", {"rope_scaling": _LONGROPE | {"long_factor": [10**400] * 8}}, "rope_scaling.long_factor must be"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_computed_is_named(family: str, changes: dict[str, Any], complaint: str) -> None:
    architecture = f"{family}ForCausalLM"
    raw = {"architectures": [architecture], **_SIZES, **_FAMILIES[architecture], **changes}
    with pytest.raises(SpecError) as caught:
        parse(raw, Path("config.json"))
    assert complaint in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_a_null_switch_is_false_as_in_transformers() -> None:
    raw = {"architectures": ["DeepseekV3ForCausalLM"], **_SIZES, **_FAMILIES["DeepseekV3ForCausalLM"]}
    found = [parse(raw | given, Path("config.json")) for given in ({}, {"norm_topk_prob": None})]
    assert [model.experts and model.experts.normalizes_weights for model in found] == [True, False]


def test_each_family_reads_its_own_activation() -> None:
    """Gemma's is `hidden_activation`, the others' is `hidden_act`."""
    both = _SIZES | {"hidden_activation": "gelu", "hidden_act": "silu"}
    kinds = [
        parse({"architectures": [f"{name}ForCausalLM"], **both}, Path("config.json")).activation.kind
        for name in ("Gemma2", "Phi3")
    ]
    assert kinds == ["gelu", "silu"]


_YARN = {"original_max_position_embeddings": 16384, "factor": 16, "apply_scale": False, "beta": 32, "alpha": 1}
_SCALING = {"original_max_position_embeddings": 16384, "beta": 0.1}
_VISION = {"hidden_size": 1024, "num_hidden_layers": 24, "image_token_id": 10, "mm_projector_id": "patch_merge"}
NEMO: dict[str, Any] = {
    "dim": 5120, "n_layers": 40, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
    "norm_eps": 1e-05, "vocab_size": 131072, "rope_theta": 1000000.0,
}  # fmt: skip
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
        "expert_parallel": 1, "expert_model_parallel": 1, "route_every_n": 1, "first_k_dense_replace": 3,
        "num_experts": 128, "num_experts_per_tok": 4, "num_expert_groups": 1, "num_expert_groups_per_tok": 1,
        "routed_scale": 1.0, "expert_hidden_dim": 4096, "num_shared_experts": 1,
    },
}  # fmt: skip
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
    assert [large.layers[layer].is_sparse for layer in (0, 2, 3, 60)] == [False, False, True, True]
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
