"""What a model directory says of its model: the shape of its layers, and a fingerprint of its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cluster.errors import SpecError
from cluster.gguf_table import TABLE, read_table

SUPPORTED_ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM"),
)
QUANTIZATION_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq")

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "factors")
_ROPE_PARAMETERS = (
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim", "truncate"),
)
_SAMPLES = 16  # places at which fingerprint() looks into each weight file
_SAMPLE_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched; `kind` and the parameters are those of transformers' rope types.

    One kind is ours: "factors" divides each frequency by its own number, as GGUF files of Llama 3.1 and later say it.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()  # factors: head_dim / 2 of them


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a mixture-of-experts model: gated MLPs, of which each token passes through a few."""

    num_experts: int  # of each sparse layer
    num_per_token: int
    intermediate_size: int  # of one expert
    normalizes_weights: bool  # whether the weights of a token's experts are made to sum to 1
    is_sparse: tuple[bool, ...]  # per layer; the others have one dense MLP


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only model. Counts are the whole model's, before any tensor parallelism."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # positions that the rotary embedding was trained for
    max_context: int  # tokens, prompt and output together; max_position stretched by the rope scaling
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool  # of the attention's output projection
    has_mlp_bias: bool
    has_qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # per layer; a token attends to itself and window - 1 before it
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    experts: ExpertsConfig | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts in the place of its MLP."""
        return self.experts is not None and self.experts.is_sparse[layer]

    @property
    def num_parameters(self) -> int:
        attention = self.head_dim * (2 * self.num_q_heads + 2 * self.num_kv_heads) * self.hidden_size
        layers = self.num_layers * (attention + 2 * self.hidden_size)
        layers += sum(3 * self.hidden_size * self._mlp_features(layer) for layer in range(self.num_layers))
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return layers + embeddings + self.hidden_size

    def _mlp_features(self, layer: int) -> int:
        if self.experts is None or not self.experts.is_sparse[layer]:
            return self.intermediate_size
        return self.experts.num_experts * self.experts.intermediate_size

    def kv_values_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, keys and values, all layers, all heads."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    def tensor_parallel_choices(self) -> list[int]:
        """The tensor-parallel sizes that fit: query heads divide evenly, and KV heads divide or are replicated."""
        sizes = (size for size in range(1, self.num_q_heads + 1) if self.num_q_heads % size == 0)
        return [size for size in sizes if self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0]

    def check_tensor_parallel(self, size: int) -> None:
        """Raise SpecError, naming the sizes that fit, unless `size` does."""
        choices = self.tensor_parallel_choices()
        if size not in choices:
            raise SpecError(
                f"tensor_parallel: {size} does not fit {self.num_q_heads} query and {self.num_kv_heads} KV heads; "
                f"choose one of {', '.join(map(str, choices))}"
            )

    def check_expert_parallel(self, size: int) -> None:
        """Raise SpecError unless there are experts to spread over `size` ranks."""
        if self.experts is None:
            raise SpecError(f"expert_parallel: {self.architecture} has no experts; leave it out")
        if self.experts.num_experts < size:
            raise SpecError(f"expert_parallel: {self.experts.num_experts} experts do not fill {size} ranks")


def load(path: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a model directory. Raises SpecError."""
    raw = _read_json(path / "config.json")
    try:
        return _parse(raw, _read_json(path / "generation_config.json", missing_ok=True))
    except SpecError as error:
        raise SpecError(f"{path / 'config.json'}: {error}") from None
    except KeyError as error:
        raise SpecError(f"{path / 'config.json'}: {error.args[0]} is missing") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise SpecError(f"{path / 'config.json'}: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights of a model directory, sorted. Raises SpecError if there are none."""
    index = path / "model.safetensors.index.json"
    if (path / TABLE).exists():
        files = sorted({Path(tensor.file) for tensor in read_table(path)})
    elif index.exists():
        files = sorted({path / name for name in _read_json(index)["weight_map"].values()})
    elif (path / "model.safetensors").exists():
        files = [path / "model.safetensors"]
    else:
        raise SpecError(f"{path}: no weights: expected model.safetensors, model.safetensors.index.json or a .gguf file")
    if missing := [str(file) for file in files if not file.exists()]:
        raise SpecError(f"{path}: weight files are missing: {', '.join(missing)}")
    return files


def quantization_config(path: Path) -> dict[str, Any] | None:
    """What config.json says of quantised weights; None if they are not."""
    return _read_json(path / "config.json").get("quantization_config")


def fingerprint(path: Path) -> str:
    """A name for these weights: equal on every machine that holds the same files, quick whatever their size.

    Hashes config.json and, of each weight file, its size and samples of its bytes.
    """
    digest = blake2b(digest_size=16, person=b"model")
    digest.update((path / "config.json").read_bytes())
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as data:
            for sample in range(_SAMPLES):
                data.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text())
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise SpecError(f"{path}: no such file; a model directory has config.json beside its weights") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(tree, dict):
        raise SpecError(f"{path}: not a JSON object")
    return tree


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    architecture = (raw.get("architectures") or ["(none)"])[0]
    _refuse_unsupported(architecture, raw)
    hidden_size, num_q_heads = raw["hidden_size"], raw["num_attention_heads"]
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_q_heads
    scaling = _rope_scaling(raw)
    has_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        num_layers=raw["num_hidden_layers"],
        hidden_size=hidden_size,
        intermediate_size=raw["intermediate_size"],
        experts=_experts(architecture, raw),
        num_q_heads=num_q_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_q_heads,
        head_dim=raw.get("head_dim") or default_head_dim,
        vocab_size=raw["vocab_size"],
        max_position=raw["max_position_embeddings"],
        max_context=_max_context(raw["max_position_embeddings"], scaling),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=_rope(raw).get("rope_theta") or 10000.0,
        rope_scaling=scaling,
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        has_qkv_bias=architecture == "Qwen2ForCausalLM" or has_bias,
        has_output_bias=architecture != "Qwen2ForCausalLM" and has_bias,
        has_mlp_bias=bool(raw.get("mlp_bias", False)),
        has_qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        sliding_windows=_sliding_windows(architecture, raw),
        bos_token_id=generation.get("bos_token_id", raw.get("bos_token_id")),
        eos_token_ids=_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def _experts(architecture: str, raw: Mapping[str, Any]) -> ExpertsConfig | None:
    num_layers: int = raw["num_hidden_layers"]
    if architecture == "MixtralForCausalLM":
        return ExpertsConfig(
            num_experts=raw["num_local_experts"],
            num_per_token=raw["num_experts_per_tok"],
            intermediate_size=raw["intermediate_size"],
            normalizes_weights=True,
            is_sparse=(True,) * num_layers,
        )
    if architecture == "Qwen3MoeForCausalLM":
        step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
        return ExpertsConfig(
            num_experts=raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],
            num_per_token=raw["num_experts_per_tok"],
            intermediate_size=raw["moe_intermediate_size"],
            normalizes_weights=bool(raw.get("norm_topk_prob", False)),
            is_sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        )
    return None


def _refuse_unsupported(architecture: str, raw: Mapping[str, Any]) -> None:
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise SpecError(f"architecture {architecture} is not supported; supported: {supported}")
    if raw.get("hidden_act", "silu") != "silu":
        raise SpecError(f"hidden_act {raw['hidden_act']} is not supported; supported: silu")
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if method not in (None, *QUANTIZATION_METHODS):
        known = ", ".join(QUANTIZATION_METHODS)
        raise SpecError(f"weights quantised by {method} are not supported; supported: {known}, and GGUF files")
    if (_rope(raw).get("partial_rotary_factor") or 1.0) != 1.0:
        raise SpecError("partial_rotary_factor other than 1 is not supported")


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings in transformers 5's form: theta and scaling together."""
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if settings.get(key) is None and raw.get(key) is not None:
            settings[key] = raw[key]
    return settings


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
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position=original,
        factors=tuple(given.get("factors", ())),
        **{key: given[key] for key in _ROPE_PARAMETERS if given.get(key) is not None},
    )


def _max_context(max_position: int, scaling: RopeScaling) -> int:
    """Linear and dynamic scaling leave max_position_embeddings as it was trained; yarn may or may not."""
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
    types = raw.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    return tuple(window if kind == "sliding_attention" else None for kind in types[:num_layers])


def _token_ids(given: int | list[int] | None) -> tuple[int, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (given,)
