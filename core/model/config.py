"""Configuration of a model directory: the shape of its layers, and a fingerprint of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from core.model.json_file import read_object
from core.model.shape import ExpertsConfig, LatentConfig, ModelConfig, RopeScaling
from core.model.weight_files import weight_files
from core.model.weight_formats import check_method
from core.types.errors import SpecError

SUPPORTED_ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
)

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "factors")
_ROPE_PARAMETERS = (
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
)
_SAMPLES = 16  # samples per weight file in fingerprint()
_SAMPLE_BYTES = 16 * 1024

# Numbers of config.json: counts, and real numbers of the rotary embedding.
_COUNTS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
_REALS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
)
_SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "qkv_bias", "mlp_bias", "use_sliding_window"),
    *("norm_topk_prob", "rope_interleave"),
)
_MOST = (1 << 31) - 1
_THETA = 10000.0  # rotary base where config.json has none


def load(path: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a model directory. Raises SpecError."""
    generation = read_object(path / "generation_config.json", missing_ok=True)
    return parse(read_object(path / "config.json"), path / "config.json", generation)


def parse(
    raw: Mapping[str, Any],
    origin: Path,
    generation: Mapping[str, Any] | None = None,
    *,
    architecture: str | None = None,
) -> ModelConfig:
    """Parse the contents of a config.json. Raises SpecError, which names `origin`.

    architecture: overrides the one in the file.
    """
    if architecture:
        raw = {**raw, "architectures": [architecture]}
    try:
        return _parse(raw, generation or {})
    except SpecError as error:
        raise SpecError(f"{origin}: {error}") from None
    except KeyError as error:
        raise SpecError(f"{origin}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise SpecError(f"{origin}: {error}") from error


def quantization_config(path: Path) -> dict[str, Any]:
    """Return the settings of quantized weights: config.json's, or ModelOpt's own file; empty if not quantized."""
    if given := read_object(path / "config.json").get("quantization_config"):
        if not isinstance(given, dict):
            raise SpecError(f"{path / 'config.json'}: quantization_config is {given!r}, and must be an object")
        return given
    settings = read_object(path / "hf_quant_config.json", missing_ok=True).get("quantization")
    settings = settings if isinstance(settings, dict) else {}
    return {"quant_method": "modelopt", **settings} if settings.get("quant_algo") else {}


def fingerprint(path: Path) -> str:
    """Return an identity of the weights: equal on every machine with the same files, and fast for any size.

    Hashes config.json, the index, and the size and byte samples of each weight file.
    """
    digest = blake2b(digest_size=16, person=b"model")
    digest.update((path / "config.json").read_bytes())
    files = weight_files(path)
    for name, file in sorted((files.index or {}).items()):
        digest.update(f"{name} {file.name} ".encode())
    for file in files.paths:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as data:
            for sample in range(_SAMPLES):
                data.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def token_ids(given: Any) -> tuple[int, ...]:
    """Return the ids of an eos_token_id: null, an id or a list of ids. Raises SpecError."""
    listed = [] if given is None else given if isinstance(given, list) else [given]
    if wrong := [found for found in listed if type(found) is not int]:
        raise SpecError(f"eos_token_id (generation_config.json comes first) is {wrong[0]!r}, and must be a token id")
    return tuple(listed)


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    raw = {name: found for name, found in raw.items() if found is not None}
    listed = raw.get("architectures") or [_of_type(raw.get("model_type"))]
    architecture = listed if isinstance(listed, str) else listed[0]
    _reject_unsupported(architecture, raw)
    _check_numbers(raw)
    hidden_size, num_q_heads = raw["hidden_size"], raw["num_attention_heads"]
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_q_heads
    latent = _latent(architecture, raw)
    scaling = _rope_scaling(raw)
    has_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        num_layers=raw["num_hidden_layers"],
        hidden_size=hidden_size,
        intermediate_size=raw["intermediate_size"],
        experts=_experts(architecture, raw),
        num_q_heads=num_q_heads,
        num_kv_heads=1 if latent else raw.get("num_key_value_heads") or num_q_heads,
        head_dim=latent.nope_dim + latent.rope_dim if latent else raw.get("head_dim") or default_head_dim,
        latent=latent,
        vocab_size=raw["vocab_size"],
        max_position=raw["max_position_embeddings"],
        max_context=_max_context(raw["max_position_embeddings"], scaling),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=_rope(raw).get("rope_theta") or _THETA,
        rope_scaling=scaling,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=has_bias or (architecture.startswith("Qwen2") and bool(raw.get("qkv_bias", True))),
        has_output_bias=architecture != "Qwen2ForCausalLM" and has_bias,
        has_mlp_bias=bool(raw.get("mlp_bias", False)),
        has_qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        sliding_windows=_sliding_windows(architecture, raw),
        bos_token_id=generation.get("bos_token_id", raw.get("bos_token_id")),
        eos_token_ids=token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def _of_type(model_type: object) -> str:
    """Return the architecture of a model type, which transformers takes if a config lists none."""
    return "".join(map(str.capitalize, str(model_type or "(none)").split("_"))) + ("ForCausalLM" if model_type else "")


def _check_numbers(raw: Mapping[str, Any]) -> None:
    """Check the numbers and switches that define tensors and arithmetic."""
    for name in _SWITCHES:
        if (found := raw.get(name)) not in (None, True, False):
            raise SpecError(f"{name} is {found!r}, and must be true or false")
    for name in _COUNTS:
        if (found := raw.get(name)) is not None and not (type(found) is int and 1 <= found <= _MOST):
            raise SpecError(f"{name} is {found!r}, and must be a whole number from 1 to {_MOST}")
    rope = _rope(raw)
    for name, found in {"rms_norm_eps": raw.get("rms_norm_eps"), **{name: rope.get(name) for name in _REALS}}.items():
        if found is not None and not (type(found) in (int, float) and 0 < found < math.inf):
            raise SpecError(f"{name} is {found!r}, and must be a number above 0")


def _experts(architecture: str, raw: Mapping[str, Any]) -> ExpertsConfig | None:
    match architecture:
        case "MixtralForCausalLM":
            return ExpertsConfig(
                num_experts=raw["num_local_experts"],
                num_per_token=raw["num_experts_per_tok"],
                intermediate_size=raw["intermediate_size"],
                normalizes_weights=True,
                is_sparse=(True,) * raw["num_hidden_layers"],
            )
        case "Qwen2MoeForCausalLM" | "Qwen3MoeForCausalLM":
            return _qwen_experts(raw)
        case "DeepseekV2ForCausalLM" | "DeepseekV3ForCausalLM":
            return _deepseek_experts(raw, is_v3=architecture == "DeepseekV3ForCausalLM")
    return None


def _qwen_experts(raw: Mapping[str, Any]) -> ExpertsConfig:
    num_layers: int = raw["num_hidden_layers"]
    step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    return ExpertsConfig(
        num_experts=raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],
        num_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        normalizes_weights=bool(raw.get("norm_topk_prob", False)),
        is_sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        shared_size=raw.get("shared_expert_intermediate_size", 0),
        has_shared_gate="shared_expert_intermediate_size" in raw,
    )


def _deepseek_experts(raw: Mapping[str, Any], *, is_v3: bool) -> ExpertsConfig | None:
    num_layers: int = raw["num_hidden_layers"]
    if not raw.get("n_routed_experts") or raw.get("first_k_dense_replace", 0) >= num_layers:
        return None
    if raw.get("moe_layer_freq", 1) != 1:
        raise SpecError("moe_layer_freq other than 1 is not supported")
    method = raw.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    if method not in (("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")):
        raise SpecError(f"topk_method {method} is not supported")
    has_groups = method != "greedy"
    return ExpertsConfig(
        num_experts=raw["n_routed_experts"],
        num_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        # V2 configs set norm_topk_prob, but DeepSeek's code for greedy models and transformers both ignore it.
        normalizes_weights=is_v3 and bool(raw.get("norm_topk_prob", True)),
        is_sparse=tuple(i >= raw.get("first_k_dense_replace", 0) for i in range(num_layers)),
        shared_size=raw["moe_intermediate_size"] * (raw.get("n_shared_experts") or 0),
        scores="sigmoid" if is_v3 else "softmax",
        num_groups=raw.get("n_group") or 1 if has_groups else 1,
        num_groups_per_token=raw.get("topk_group") or 1 if has_groups else 1,
        weight_scale=raw.get("routed_scaling_factor", 1.0),
        scores_in_fp32=True,
    )


def _latent(architecture: str, raw: Mapping[str, Any]) -> LatentConfig | None:
    if architecture not in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"):
        return None
    return LatentConfig(
        latent_dim=raw["kv_lora_rank"],
        rope_dim=raw["qk_rope_head_dim"],
        nope_dim=raw["qk_nope_head_dim"],
        value_dim=raw["v_head_dim"],
        query_dim=raw.get("q_lora_rank"),
        is_interleaved=architecture == "DeepseekV2ForCausalLM" or bool(raw.get("rope_interleave", True)),
    )


def _reject_unsupported(architecture: str, raw: Mapping[str, Any]) -> None:
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise SpecError(f"architecture {architecture} is not supported; supported: {supported}")
    if raw.get("hidden_act", "silu") != "silu":
        raise SpecError(f"hidden_act {raw['hidden_act']} is not supported; supported: silu")
    check_method(_object(raw, "quantization_config") or _object(raw, "quantization"))
    if (_rope(raw).get("partial_rotary_factor") or 1.0) != 1.0:
        raise SpecError("partial_rotary_factor other than 1 is not supported")


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings in transformers 5's form: theta and scaling together.

    rope_scaling, which users add for longer contexts, replaces rope_parameters, as in transformers.
    """
    parameters, scaling = _object(raw, "rope_parameters"), _object(raw, "rope_scaling")
    settings = dict(scaling or parameters)
    if nested := [name for name, found in settings.items() if isinstance(found, dict)]:
        raise SpecError(f"rope_parameters per kind of layer ({', '.join(nested)}) are not supported")
    for key in ("rope_theta", "partial_rotary_factor"):
        if settings.get(key) is None and raw.get(key) is not None:
            settings[key] = raw[key]
    if (theta := parameters.get("rope_theta")) and theta != (settings.get("rope_theta") or _THETA):
        raise SpecError(
            f"rope_scaling replaces rope_parameters, and its rope_theta of {theta} would be lost; set rope_theta in "
            "rope_scaling, too"
        )
    return settings


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = raw.get(name) or {}
    if not isinstance(found, dict):
        raise SpecError(f"{name} is {found!r}, and must be a JSON object")
    return found


def _rope_scaling(raw: Mapping[str, Any]) -> RopeScaling:
    given = _rope(raw)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise SpecError(f"rope type {kind} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    original = raw.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = original or raw["max_position_embeddings"]
    factor = 1.0 if kind in ("default", "factors") else given.get("factor")
    if factor is None and kind == "yarn":
        factor = raw["max_position_embeddings"] / original
    if factor is None:
        raise KeyError("rope_scaling.factor")
    for key in ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ():
        if given.get(key) is None:
            raise KeyError(f"rope_scaling.{key}")
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position=original,
        factors=tuple(given.get("factors", ())),
        **{key: given[key] for key in _ROPE_PARAMETERS if given.get(key) is not None},
    )


def _max_context(max_position: int, scaling: RopeScaling) -> int:
    """Return the context length. max_position_embeddings excludes linear and dynamic scaling, and may include yarn."""
    if scaling.kind in ("linear", "dynamic"):
        return math.floor(max_position * scaling.factor)
    if scaling.kind == "yarn":
        return max(max_position, math.floor(scaling.original_max_position * scaling.factor))
    return max_position


def _sliding_windows(architecture: str, raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    num_layers: int = raw["num_hidden_layers"]
    window: int | None = raw.get("sliding_window")
    if architecture == "LlamaForCausalLM" or not window:
        return (None,) * num_layers
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    if architecture == "Qwen3MoeForCausalLM":
        return (window,) * num_layers
    first = raw.get("max_window_layers", 28)
    if architecture == "Qwen2MoeForCausalLM" and not raw.get("layer_types"):
        return tuple(window if i % 2 == 0 and i < first else None for i in range(num_layers))
    types = raw.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    return tuple(window if kind == "sliding_attention" else None for kind in types[:num_layers])
