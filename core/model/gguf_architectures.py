"""Architectures of GGUF files: their metadata as a Hugging Face config, and Hugging Face's names of their tensors.

Both invert llama.cpp's converter (conversion/*.py). A setting that a file omits has the default of src/models/*.cpp.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.types.errors import SpecError

logger = logging.getLogger(__name__)

Config = dict[str, Any]
_MAX_COUNT = 1 << 31
_SIGMOID = 2  # expert_gating_func

# Keys that change results, each with its neutral values, for architectures that do not read them. 0 means not set.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("attention.scale", "attention.output_scale", "attention.temperature_scale"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.shared_kv_layers"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("expert_count", "expert_shared_count", "nextn_predict_layers", "attention.q_lora_rank"), (0,)),
    **dict.fromkeys(("embedding_length_per_layer_input", "attention.indexer.top_k", "swiglu_clamp_exp"), (0,)),
    **dict.fromkeys(("expert_gating_func", "expert_group_count", "expert_weights_scale"), (0, 1)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (0, 1)),
    **dict.fromkeys(("rope.scaling.yarn_log_multiplier", "rope.scaling.alpha"), (0,)),
    "rope.scaling.yarn_ext_factor": (1,),
    "attention.causal": (True,),
}


class GGUFMetadata:
    """Metadata of one architecture, checked as it is read.

    names: tensors of the file. vectors: values of the tensors that hold rotary divisors.
    """

    def __init__(
        self, raw: Mapping[str, Any], names: frozenset[str], vectors: Mapping[str, list[float]], architecture: str
    ) -> None:
        self.names, self.vectors = names, vectors
        self._raw, self._architecture = raw, architecture
        self._read = set[str]()

    def any(self, key: str, default: Any = None) -> Any:
        """Return a value, which may be a list of values per layer."""
        self._read.add(key)
        return self._raw.get(f"{self._architecture}.{key}", default)

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of all layers. Raises SpecError for a list, or if it is missing without a default."""
        found = self.any(key, default)
        if found is None:
            raise SpecError(f"the metadata lacks {self._architecture}.{key}")
        if isinstance(found, list):
            raise SpecError(f"its layers differ in {key}, which is not supported")
        return found

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        found = self.value(key, default)
        if type(found) is not int or not least <= found <= _MAX_COUNT:
            raise SpecError(f"{self._architecture}.{key} is {found!r}, and not a number from {least} to {_MAX_COUNT}")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.value(key, default)
        if type(found) not in (int, float) or not 0 < found < math.inf:
            raise SpecError(f"{self._architecture}.{key} is {found!r}, and not a number above 0")
        return float(found)

    def given(self, **keys: str) -> Config:
        """Return settings of the keys that the file has: given(setting=key)."""
        return {name: self.number(key) for name, key in keys.items() if self.any(key) is not None}

    def check_unread(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise SpecError if a key that no code has read has a value that is not neutral."""
        for key, values in {**_NEUTRAL, **neutral}.items():
            found = None if key in self._read else self.any(key)
            listed = found if isinstance(found, list) else [] if found is None else [found]
            if any(one not in values for one in listed):
                raise SpecError(
                    f"{self._architecture}.{key} is {found!r}, which is not supported; supported: {values[-1]}"
                )


@dataclass(frozen=True, kw_only=True)
class GGUFArchitecture:
    """Architecture of GGUF files. family: that of config.json. settings: returns those that differ from `_common`'s."""

    family: str
    settings: Callable[[GGUFMetadata, Config], Config] = lambda metadata, config: {}
    # Tensor names that differ from `_IN_LAYER`.
    tensors: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    # Whether the converter placed row i + D/2 of each query and key head after row i.
    is_interleaved: bool = False


def read_config(architecture: str, metadata: GGUFMetadata) -> Config:
    """Return config.json in Hugging Face's form, without special tokens. Raises SpecError."""
    found = ARCHITECTURES[architecture]
    config = {"architectures": [found.family], **_common(metadata)}
    config["rope_scaling"] = _rope_scaling(metadata)
    config |= found.settings(metadata, config)
    head_dim, theta = config["head_dim"], config["rope_theta"]
    heads = ("rope.dimension_count", "rope.dimension_count_swa", "attention.value_length", "attention.key_length_swa")
    metadata.check_unread(
        {"rope.freq_base_swa": (0, theta)} | dict.fromkeys((*heads, "attention.value_length_swa"), (0, head_dim))
    )
    if divisors := metadata.vectors.get("rope_freqs"):  # Llama 3.1
        config["rope_scaling"] = {"rope_type": "factors", "factors": divisors}
    return config


def stored_names(architecture: str, role: str, suffix: str) -> tuple[str, ...]:
    """Return Hugging Face's names, within a layer, of the matrices in a tensor's rows; empty for an unknown tensor.

    {e} stands for an expert's number.
    """
    if exact := _EXACT.get(f"{role}.{suffix}"):
        return (exact,)
    found = {**_IN_LAYER, **ARCHITECTURES[architecture].tensors}.get(role, ())
    return tuple(f"{name}.{suffix}" for name in ((found,) if isinstance(found, str) else found))


def _common(metadata: GGUFMetadata) -> Config:
    num_heads, hidden_size = metadata.count("attention.head_count"), metadata.count("embedding_length")
    num_layers = metadata.count("block_count")
    if num_layers > len(metadata.names):  # bounds the work per layer that precedes the look-up of its tensors
        raise SpecError(f"block_count is {num_layers}, and there are {len(metadata.names)} tensors")
    return {
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", num_heads),
        "head_dim": metadata.count("attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "attention_bias": "blk.0.attn_q.bias" in metadata.names,
        "tie_word_embeddings": "output.weight" not in metadata.names,
        "torch_dtype": "bfloat16",
    }


def _rope_scaling(metadata: GGUFMetadata) -> Config | None:
    """Return the rotary scaling with llama.cpp's defaults: linear, with a factor that older files name differently."""
    kind = metadata.value("rope.scaling.type", "linear")
    if kind in ("none", "longrope"):  # longrope: its divisors are tensors
        return None
    older = metadata.value("rope.scale_linear", 0)
    if kind == "linear":
        factor = metadata.value("rope.scaling.factor", older)
        return None if factor in (0, 1) else {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn":
        raise SpecError(f"rope scaling {kind!r} is not supported; supported in GGUF files: linear, yarn, longrope")
    context = metadata.count("context_length")
    return {
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length", context),
        **metadata.given(beta_fast="rope.scaling.yarn_beta_fast", beta_slow="rope.scaling.yarn_beta_slow"),
    }


def _llama(metadata: GGUFMetadata, config: Config) -> Config:
    """Read Llama, Mistral if there is a window, and Mixtral if there are experts."""
    window = metadata.value("attention.sliding_window", 0)
    if num_experts := metadata.count("expert_count", 0, least=0):
        return {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": num_experts,
            "num_experts_per_tok": metadata.count("expert_used_count"),
            "sliding_window": window or None,
        }
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window} if window else {}


def _qwen2(metadata: GGUFMetadata, config: Config) -> Config:
    return {"attention_bias": False}  # its biases of queries, keys and values are not a setting


def _qwen3_moe(metadata: GGUFMetadata, config: Config) -> Config:
    return _experts(metadata) | {"num_experts": metadata.count("expert_count"), "norm_topk_prob": True}


def _experts(metadata: GGUFMetadata) -> Config:
    return {
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
    }


def _gemma2(metadata: GGUFMetadata, config: Config) -> Config:
    caps = metadata.given(
        attn_logit_softcapping="attn_logit_softcapping", final_logit_softcapping="final_logit_softcapping"
    )
    return _gemma(metadata, config, period=2, widest=46) | caps


def _gemma3(metadata: GGUFMetadata, config: Config) -> Config:
    local = {"rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0)}
    caps = metadata.given(final_logit_softcapping="final_logit_softcapping")
    return _gemma(metadata, config, period=6, widest=62) | local | caps


def _gemma(metadata: GGUFMetadata, config: Config, *, period: int, widest: int) -> Config:
    """Read what Gemma 2 and 3 share. widest: number of layers of the 27B model, which scales scores differently."""
    is_widest = config["num_hidden_layers"] == widest
    return _windows(metadata, config, period) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "norms_add_one": False,  # the converter has added it
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_widest
        else config["head_dim"],
    }


def _windows(metadata: GGUFMetadata, config: Config, period: int) -> Config:
    """Read the window; the last layer of each period has none. The file may have its own period, or a list."""
    num_layers, window = config["num_hidden_layers"], metadata.value("attention.sliding_window", 0)
    pattern = metadata.any("attention.sliding_window_pattern", period)
    if not isinstance(pattern, list):
        pattern = [(index + 1) % pattern != 0 if pattern else True for index in range(num_layers)]
    kinds = ["sliding_attention" if slides and window else "full_attention" for slides in pattern]
    return {"sliding_window": window or None, "layer_types": kinds}


def _phi3(metadata: GGUFMetadata, config: Config) -> Config:
    found: Config = {"sliding_window": metadata.value("attention.sliding_window", 0) or None}
    found |= _partial_rotation(metadata, config)
    if long := metadata.vectors.get("rope_factors_long"):
        found["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": metadata.vectors.get("rope_factors_short"),
            "original_max_position_embeddings": metadata.count("rope.scaling.original_context_length"),
            **metadata.given(attention_factor="rope.scaling.attn_factor"),
        }
    return found


def _partial_rotation(metadata: GGUFMetadata, config: Config) -> Config:
    head_dim = config["head_dim"]
    rotated = metadata.count("rope.dimension_count", head_dim)
    # The next number above, because the share of head_dim is rounded down.
    return {"partial_rotary_factor": math.nextafter(rotated / head_dim, 1)}


def _gpt_oss(metadata: GGUFMetadata, config: Config) -> Config:
    scaling = config["rope_scaling"]
    return _windows(metadata, config, 2) | {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "rope_scaling": scaling | {"truncate": False} if scaling else {"rope_type": "default"},
    }


def _glm4_moe(metadata: GGUFMetadata, config: Config) -> Config:
    if metadata.value("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise SpecError("glm4moe.expert_gating_func is not sigmoid, which is not supported")
    own = {"use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.names}
    return _routed_experts(metadata, config) | _partial_rotation(metadata, config) | own


def _deepseek2(metadata: GGUFMetadata, config: Config) -> Config:
    """Read DeepSeek-V2 and V3, Kimi-K2 and GLM-4.7-Flash. Older files keep the heads' own sizes in other keys."""
    rotated, scaling = metadata.count("rope.dimension_count"), config["rope_scaling"]
    value_dim = metadata.count("attention.value_length", config["head_dim"])
    found = _routed_experts(metadata, config) | {
        "kv_lora_rank": metadata.count("attention.kv_lora_rank"),
        "q_lora_rank": metadata.count("attention.q_lora_rank", 0, least=0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": metadata.count("attention.key_length_mla", config["head_dim"]) - rotated,
        "v_head_dim": metadata.count("attention.value_length_mla", value_dim),
        "attention_bias": False,
    }
    if scaling:
        scale = metadata.number("rope.scaling.yarn_log_multiplier") / 0.1
        found["rope_scaling"] = scaling | {"mscale": scale, "mscale_all_dim": scale}
    has_correction = any(name.endswith(".exp_probs_b.bias") for name in metadata.names)
    if metadata.value("expert_gating_func", 0) == _SIGMOID or has_correction:
        return found | {"architectures": ["DeepseekV3ForCausalLM"]}
    if found["norm_topk_prob"]:
        raise SpecError("deepseek2.expert_weights_norm is not supported for softmax scores")
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def _routed_experts(metadata: GGUFMetadata, config: Config) -> Config:
    """Read experts beside shared ones. Layers that predict further tokens (MTP) are left out."""
    if metadata.any("expert_group_count") is None:
        logger.warning("the GGUF names no groups of experts (expert_group_count): tokens choose among all experts")
    return _experts(metadata) | {
        "num_hidden_layers": config["num_hidden_layers"] - metadata.count("nextn_predict_layers", 0, least=0),
        "n_routed_experts": metadata.count("expert_count"),
        "n_shared_experts": metadata.count("expert_shared_count", 0, least=0),
        "first_k_dense_replace": metadata.count("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": metadata.value("expert_weights_scale", 0) or 1.0,
        "norm_topk_prob": bool(metadata.value("expert_weights_norm", False)),
        "n_group": metadata.count("expert_group_count", 1),
        "topk_group": metadata.count("expert_group_used_count", 1),
    }


_IN_LAYER: Mapping[str, str | tuple[str, ...]] = {
    "attn_norm": "input_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    # The two parts of kv_b_proj, (H, L, N) and (H, V, L); the checkpoint joins them.
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"mlp.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_EXACT = {"attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_GEMMA = {"ffn_norm": "pre_feedforward_layernorm"}

ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(family="LlamaForCausalLM", settings=_llama, is_interleaved=True),
    "qwen2": GGUFArchitecture(family="Qwen2ForCausalLM", settings=_qwen2),
    "qwen3": GGUFArchitecture(family="Qwen3ForCausalLM"),
    "qwen3moe": GGUFArchitecture(family="Qwen3MoeForCausalLM", settings=_qwen3_moe),
    "gemma2": GGUFArchitecture(family="Gemma2ForCausalLM", settings=_gemma2, tensors=_GEMMA),
    "gemma3": GGUFArchitecture(family="Gemma3ForCausalLM", settings=_gemma3, tensors=_GEMMA),
    "phi3": GGUFArchitecture(
        family="Phi3ForCausalLM", settings=_phi3, tensors={"ffn_up": ("mlp.gate_proj", "mlp.up_proj")}
    ),
    "gpt-oss": GGUFArchitecture(family="GptOssForCausalLM", settings=_gpt_oss),
    "glm4moe": GGUFArchitecture(family="Glm4MoeForCausalLM", settings=_glm4_moe),
    "deepseek2": GGUFArchitecture(family="DeepseekV2ForCausalLM", settings=_deepseek2),
}


def rows_of(names: Sequence[str], num_rows: int, config: Config) -> list[int]:
    """Return the number of rows of each matrix that a tensor holds."""
    if len(names) != 3:
        return [num_rows // len(names)] * len(names)
    return [config[heads] * config["head_dim"] for heads in ("num_attention_heads", *("num_key_value_heads",) * 2)]
