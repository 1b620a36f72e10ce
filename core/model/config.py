"""Configuration of a model directory: the shape of its layers, and a fingerprint of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from core.model.config_file import PARAMS, config_file, own_names, read_config
from core.model.families import FAMILIES
from core.model.families.family import Family
from core.model.settings import MOST, Settings, one_line, read_object
from core.model.shape import ModelConfig
from core.model.weight_files import weight_files
from core.model.weight_formats import check_method, with_usual_method
from core.types.errors import SpecError

_MOST_EXPERTS = 1 << 18  # of all layers; the largest published models have fewer than 1 << 15
_SAMPLES = 16  # samples per weight file in fingerprint()
_SAMPLE_BYTES = 16 * 1024

_BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
_BY_MODEL_TYPE = {name: family for family in FAMILIES for name in family.model_types}
SUPPORTED_ARCHITECTURES = tuple(_BY_ARCHITECTURE)

# Keys outside `text_config` that also apply to the language model. Early files of compressed-tensors call the
# quantization settings compression_config.
_BESIDE_TEXT = ("tie_word_embeddings", "quantization_config", "compression_config", "eos_token_id")

# Settings that change the results of the families that read them, in transformers and in published code. Other families
# reject them, unless the value is neutral; see Settings.unread_effects.
_CHANGES_NUMBERS = (
    # attention
    *("attn_logit_softcapping", "attention_logit_cap", "query_pre_attn_scalar", "attention_multiplier"),
    *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier", "attention_value_scale"),
    *("attn_temperature_tuning", "clip_qkv", "alibi", "attention_chunk_size", "log_scaling_n_floor"),
    *("attn_output_gate", "use_attention_gate", "gated_attn", "use_qk_norm", "qk_layernorm", "qk_norm"),
    *("attention_k_eq_v", "use_bidirectional_attention"),
    *("num_kv_shared_layers", "num_global_key_value_heads", "kv_lora_rank", "q_lora_rank", "o_lora_rank"),
    *("index_topk", "index_topk_freq", "index_topk_pattern", "indexer_types"),
    *("rotary_dim", "partial_rotary_factor", "no_rope_layers", "no_rope_layer_interval", "layer_rope_theta"),
    *("sliding_window_pattern", "full_attention_interval"),
    # residual stream, embeddings and logits
    *("scale_depth", "dim_model_base", "residual_multiplier", "residual_scale", "use_parallel_residual"),
    *("parallel_attn", "use_sandwich_norm", "use_post_norm", "norm_after", "apply_residual_connection_post_layernorm"),
    *("embedding_multiplier", "embedding_scale", "scale_emb", "scale_embedding", "rescale_embeddings", "mup_enabled"),
    *("hidden_size_per_layer_input", "altup_num_inputs", "laurel_rank"),
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logits_scaling", "logit_scale"),
    *("lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier", "lm_head_bias"),
    # MLPs and experts
    *("mlp_multipliers", "swiglu_limit", "swiglu_limits", "activation_sparsity_pattern", "enable_moe_block"),
    *("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"),
    *("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "shared_expert_intermediate_size"),
    *("shared_intermediate_size", "route_scale", "router_scaling_factor", "moe_router_logit_softcapping"),
    *("use_expert_bias", "expert_layer_period"),
    # layers of other kinds
    *("mamba_num_heads", "mamba_n_heads", "mamba_d_state", "ssm_state_size", "ssm_multipliers", "layers_block_type"),
    *("block_types", "linear_num_value_heads", "linear_num_heads", "linear_attn_config"),
)


def load(path: Path, *, max_context: int | None = None) -> ModelConfig:
    """Read config.json (or params.json) and generation_config.json of a model directory. Raises SpecError.

    max_context: tokens per sequence that the deployment wants; see ModelConfig.lengthened.
    """
    generation = read_object(path / "generation_config.json", missing_ok=True)
    return parse(read_config(path), config_file(path), generation).lengthened(max_context)


def parse(
    raw: Mapping[str, Any],
    origin: Path,
    generation: Mapping[str, Any] | None = None,
    *,
    architecture: str | None = None,
) -> ModelConfig:
    """Parse the contents of a config.json. Raises SpecError, which names `origin` and the keys of that file.

    architecture: overrides the one in the file.
    """
    if architecture:
        raw = {**raw, "architectures": [architecture]}
    try:
        return _parse(raw, generation or {})
    except KeyError as error:
        complaint = f"{error.args[0]} is missing"
    except (SpecError, ArithmeticError, TypeError, ValueError) as error:
        complaint = one_line(error)
    raise SpecError(f"{origin}: {own_names(complaint) if origin.name == PARAMS else complaint}")


def quantization_config(path: Path) -> dict[str, Any]:
    """Return the settings of quantized weights, from config.json or a library's own file; empty if none.

    Raises SpecError.
    """
    settings = _text_settings(read_config(path))
    if given := settings.get("quantization_config") or settings.get("compression_config"):
        if not isinstance(given, dict):
            raise SpecError(f"{config_file(path)}: quantization_config is {given!r}, and must be an object")
        return with_usual_method(given)
    own = read_object(path / "hf_quant_config.json", missing_ok=True).get("quantization")
    if isinstance(own, dict) and own.get("quant_algo"):
        return {"quant_method": "modelopt", **own}
    # Files of AutoGPTQ and AutoAWQ, from before transformers had these settings.
    if "bits" in (own := read_object(path / "quantize_config.json", missing_ok=True)):
        return with_usual_method({**own, "quant_method": own.get("quant_method") or "gptq"})
    if "w_bit" in (own := read_object(path / "quant_config.json", missing_ok=True)):
        return {"quant_method": "awq", "bits": own["w_bit"], "group_size": own.get("q_group_size"), **own}
    return {}


def fingerprint(path: Path, *, max_context: int | None = None) -> str:
    """Return an identity of the weights, which is equal on every machine with the same files. Fast for any size.

    Hashes the settings, the index, and the size and byte samples of each weight file. max_context: see `load`; a
    lengthened model has another identity, because its keys differ.
    """
    digest = blake2b(digest_size=16, person=b"model")
    if max_context and any(rope.is_long for rope in load(path, max_context=max_context).ropes):
        digest.update(b"long")
    digest.update(config_file(path).read_bytes())
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
    if wrong := [found for found in listed if not (type(found) is int and 0 <= found <= MOST)]:
        raise SpecError(
            f"eos_token_id (generation_config.json comes first) is {wrong[0]!r:.60}, and must be a token id"
        )
    return tuple(listed)


def family_of(raw: Mapping[str, Any]) -> Family:
    """Return the family of a config.json.

    The text part's model_type decides, then `architectures`, then model_type. Raises SpecError if it is not supported.
    """
    kind = _name(Settings(raw).object("text_config"), "model_type")
    if kind in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[kind]
    listed = raw.get("architectures") or []
    listed = listed if isinstance(listed, list) else [listed]
    architecture = _name({"architectures": listed[0]}, "architectures") if listed else "(none)"
    if kind is None and not listed and (own := _name(raw, "model_type")) in _BY_MODEL_TYPE:
        return _BY_MODEL_TYPE[own]
    if kind is None and architecture in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[architecture]
    named = f"architecture {architecture}" + (f" with a text model of type {kind}" if kind else "")
    raise SpecError(f"{named} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _name(raw: Mapping[str, Any], key: str) -> str | None:
    found = raw.get(key)
    if not isinstance(found, str | None):
        raise SpecError(f"{key} is {found!r:.60}, and must be a name")
    return found


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    family = family_of(raw)
    settings = Settings(_text_settings(raw), family.defaults)
    check_method(settings.object("quantization_config") or settings.object("quantization"))
    fields = family.read(settings)
    for name, found in settings.unread_effects().items():
        if name in _CHANGES_NUMBERS:
            raise SpecError(f"{name} {found!r} is not supported for {family.architecture}, and changes its results")
    ends = generation.get("eos_token_id")
    ends = token_ids(settings.get("eos_token_id") if ends is None else ends)
    dtype = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    model = ModelConfig(architecture=family.architecture, eos_token_ids=ends, dtype=dtype, **fields)
    _check_layers(model)
    return model


def _check_layers(model: ModelConfig) -> None:
    """Raise SpecError for layers that cannot be computed, or that have implausibly many experts."""
    if not model.kv_layers:
        raise SpecError("no layer has attention; at least one must have it, because prefixes are found by their KV")
    for index, layer in enumerate(model.layers):
        if not (model.latent or layer.recurrent) and model.num_q_heads % layer.num_kv_heads:
            raise SpecError(
                f"num_attention_heads is {model.num_q_heads}, and must be a multiple of the {layer.num_kv_heads} "
                f"num_key_value_heads of layer {index}"
            )
        if layer.kv_layer is not None:
            source = model.layers[layer.kv_layer]
            if (layer.num_kv_heads, layer.head_dim) != (source.num_kv_heads, source.head_dim):
                raise SpecError(
                    f"layer {index} shares keys and values with layer {layer.kv_layer}, which has other heads"
                )
    num_sparse = sum(layer.is_sparse for layer in model.layers)
    if model.experts and num_sparse * model.experts.num_experts > _MOST_EXPERTS:
        raise SpecError(
            f"{num_sparse} layers of {model.experts.num_experts} experts exceed {_MOST_EXPERTS} experts; check the "
            "number of experts in config.json"
        )


def _text_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model: those under `text_config`, or all."""
    text = Settings(raw).object("text_config")
    if "text_config" not in raw or raw["text_config"] is None:
        return dict(raw)
    return {**text} | {name: raw[name] for name in _BESIDE_TEXT if raw.get(name) is not None}
