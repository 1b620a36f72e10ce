"""Settings of a model directory in config.json's form: that file, or Mistral's params.json if it is the only one.

Keys of params.json, and Mistral's own names of tensors, are those of mistral-inference and of vLLM's readers of this
format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.model.families.family import Stored
from core.model.settings import Settings, one_line, read_object
from core.types.errors import SpecError

CONFIG, PARAMS = "config.json", "params.json"
ADAPTER = "adapter_config.json"  # of a LoRA adapter
MERGE = "AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained(MERGED)"

_MAX_POSITION = 128_000  # where params.json has none, as in vLLM
_EOS = 2  # `</s>` in every vocabulary of Mistral

# Keys of params.json and of config.json.
_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_HEAD_KEYS = {"n_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_LATENT_KEYS = {name: name for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")}
_OPTIONAL_KEYS = {"tied_embeddings": "tie_word_embeddings", "activation": "hidden_act", "q_lora_rank": "q_lora_rank"}
_YARN_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_EXPERT_KEYS = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_shared_experts": "n_shared_experts",
}
_MIXTRAL_KEYS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_OPTIONAL_EXPERT_KEYS = {"routed_scale": "routed_scaling_factor"}
_MAY_BE_ZERO = ("first_k_dense_replace", "num_shared_experts")
# Other values are not published, and readers of this format differ in how they rank groups.
_ALWAYS_ONE = ("route_every_n", "num_expert_groups", "num_expert_groups_per_tok")
# Absent from params.json: the model lacks the feature. In config.json the family has a default.
_NONE_BY_DEFAULT = {"q_lora_rank": None, "n_routed_experts": None}
# Settings of training and of other engines.
_IGNORED = ("max_batch_size", "max_seq_len", "causal", "use_cache", "dtype")
_IGNORED_OF_EXPERTS = ("expert_parallel", "expert_model_parallel")

_OWN_NAMES = {
    **{
        ours: f"moe.{own}"
        for keys in (_EXPERT_KEYS, _MIXTRAL_KEYS, _OPTIONAL_EXPERT_KEYS)
        for own, ours in keys.items()
    },
    **{ours: own for keys in (_KEYS, _HEAD_KEYS, _OPTIONAL_KEYS) for own, ours in keys.items()},
}
_DIGITS = re.compile("[0-9]{1,10}")
_NAME = re.compile(rf"\b({'|'.join(_OWN_NAMES)})\b")


def config_file(directory: Path) -> Path:
    """Return the file with a model's settings: config.json, unless params.json is there and config.json is not."""
    own = directory / PARAMS
    return own if own.is_file() and not (directory / CONFIG).exists() else directory / CONFIG


def has_own_format(directory: Path) -> bool:
    """Return whether a model is in Mistral's own format."""
    return config_file(directory).name == PARAMS


def read_config(directory: Path) -> dict[str, Any]:
    """Return a model's settings in config.json's form. Raises SpecError."""
    file = config_file(directory)
    if not file.exists() and (directory / ADAPTER).is_file():
        base = read_object(directory / ADAPTER).get("base_model_name_or_path")
        raise SpecError(f"{directory}: is a LoRA adapter of {base or 'a model'}; merge it into the model: {MERGE}")
    raw = read_object(file)
    if file.name != PARAMS:
        return raw
    try:
        return _to_config(raw)
    except SpecError as error:
        raise SpecError(f"{file}: {one_line(error)}") from None


def own_names(message: str) -> str:
    """Replace config.json's keys in an error message by those of params.json."""
    return _NAME.sub(lambda match: _OWN_NAMES[match[0]], message)


def _to_config(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of params.json in config.json's form. The family that reads it checks the numbers.

    Raises SpecError for a missing key, and for an unknown one unless it is zero, false, empty, 1 or "none".
    """
    settings = Settings(params)
    settings.choice("model_type", ("transformer",), "transformer")
    experts, is_latent = settings.object("moe"), "kv_lora_rank" in settings
    kind, architecture = _family(experts, is_latent, params.get("llama_4_scaling") is not None)
    text = _renamed(settings, _KEYS | (_LATENT_KEYS if is_latent else _HEAD_KEYS), _OPTIONAL_KEYS)
    for key in _HEAD_KEYS if is_latent else ():
        settings.get(key)
    text["max_position_embeddings"] = settings.get(
        "max_position_embeddings", settings.get("max_seq_len", _MAX_POSITION)
    )
    text["rope_parameters"] = _rope(settings, is_latent=is_latent, scales=kind in ("ministral3", "mistral4"))
    if is_latent:
        text = _NONE_BY_DEFAULT | text
    else:
        text["sliding_window"] = _window(settings, text["max_position_embeddings"])
    if experts:
        with _inside("moe"):
            text |= _experts(Settings(experts), is_latent=is_latent)
    if quantization := _quantization(settings):
        text["quantization_config"] = quantization
    text |= {"model_type": kind, "eos_token_id": _EOS, "dtype": "bfloat16"}
    has_tower = _has_tower(settings)
    _refuse_unknown(settings, _IGNORED)
    return {"architectures": [architecture]} | ({"text_config": text} if has_tower else text)


def stored_tensors(*, is_latent: bool) -> tuple[Stored, ...]:
    """Return the rules for Mistral's names of tensors. is_latent: whether attention is over latents.

    Mistral rotates adjacent features. The families expect halves, so query and key heads are reordered; over latents
    they expect adjacent features.
    """
    rotary: dict[str, Any] = {} if is_latent else {"split": "rotary"}
    attention = {"wv": "v_proj", "wo": "o_proj", "wq_a": "q_a_proj", "wq_b": "q_b_proj"}
    attention |= {"wkv_a_with_mqa": "kv_a_proj_with_mqa", "wkv_b": "kv_b_proj"}
    attention |= {"q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm"}
    whole = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    layer = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    layer[r"(?:feed_forward\.)?gate"] = "mlp.gate"
    for own, ours in {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.items():
        layer[rf"feed_forward\.{own}"] = f"mlp.{ours}"
        layer[rf"shared_experts\.{own}"] = f"mlp.shared_experts.{ours}"
        layer[rf"(?:feed_forward\.)?experts\.(\d+)\.{own}"] = f"mlp.experts.{{e}}.{ours}"
    return (
        Stored(pattern=r"attention\.wq", name="self_attn.q_proj", **rotary),
        Stored(pattern=r"attention\.wk", name="self_attn.k_proj", **rotary),
        *(Stored(pattern=rf"attention\.{own}", name=f"self_attn.{ours}") for own, ours in attention.items()),
        # Directly below a layer, and at the top, so that names in transformers' format do not match.
        *(Stored(pattern=rf"(?<=\d\.){own}", name=ours) for own, ours in layer.items()),
        *(Stored(pattern=rf"(?<!\.){own}", name=ours) for own, ours in whole.items()),
    )


def _family(experts: Mapping[str, Any], is_latent: bool, scales_queries: bool) -> tuple[str, str]:
    """Return model_type and architecture."""
    if is_latent:
        return "mistral4", "Mistral4ForCausalLM"
    if experts:
        return "mixtral", "MixtralForCausalLM"
    return ("ministral3", "Ministral3ForCausalLM") if scales_queries else ("mistral", "MistralForCausalLM")


def _renamed(settings: Settings, required: Mapping[str, str], optional: Mapping[str, str]) -> dict[str, Any]:
    """Return values under config.json's keys. Raises SpecError for a missing one."""
    for key in required:
        if key not in settings:
            raise SpecError(f"{key} is missing")
    return {ours: settings.get(own) for own, ours in {**required, **optional}.items() if own in settings}


def _rope(settings: Settings, *, is_latent: bool, scales: bool) -> dict[str, Any]:
    """Return rope_parameters. scales: whether the family has query scaling.

    `apply_scale: false` leaves rotated features and scores as they are, as in vLLM. Otherwise yarn's attention factor
    applies to the rotated features or, over latents, to all scores.
    """
    if "rope_theta" not in settings:
        raise SpecError("rope_theta is missing")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.real("rope_theta")}
    if given := settings.object("yarn"):
        with _inside("yarn"):
            yarn = Settings(given)
            rope |= {"rope_type": "yarn"} | _renamed(yarn, _YARN_KEYS, {})
            yarn.count("original_max_position_embeddings")
            for key in ("factor", "beta", "alpha"):
                yarn.real(key)
            if not yarn.switch("apply_scale", True):
                rope["attention_factor"] = 1.0
            elif is_latent:
                rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
            _refuse_unknown(yarn)
    if scales and (given := settings.object("llama_4_scaling")):
        with _inside("llama_4_scaling"):
            scaling = Settings(given)
            length = scaling.count("original_max_position_embeddings")
            rope["llama_4_scaling_beta"] = scaling.real("beta")
            _refuse_unknown(scaling)
        if rope.setdefault("original_max_position_embeddings", length) != length:
            raise SpecError(
                f"llama_4_scaling.original_max_position_embeddings is {length}, and must be yarn's, "
                f"{rope['original_max_position_embeddings']}"
            )
    return rope


def _window(settings: Settings, max_position: Any) -> int | None:
    """Return the sliding window that all layers share. In a list, one as long as the context counts as none.

    Raises SpecError for layers of different kinds.
    """
    for key in ("sliding_window", "_sliding_window"):
        if key not in settings:
            continue
        found = settings.get(key)
        listed = found if isinstance(found, list) else [found]
        # Some files write numbers as strings.
        each = [int(one) if isinstance(one, str) and _DIGITS.fullmatch(one) else one for one in listed]
        windows = {None if one is None else Settings({key: one}).count(key) for one in each}
        if isinstance(found, list) and type(max_position) is int and "yarn" not in settings:
            windows = {None if one is None or one >= max_position else one for one in windows}
        if len(windows) != 1:
            raise SpecError(f"{key} {found!r:.60} is not supported: all layers must have one window")
        return windows.pop()
    return None


def _experts(experts: Settings, *, is_latent: bool) -> dict[str, Any]:
    """Return the settings of experts under the keys of Mixtral, or, over latents, of Mistral Small 4."""
    required = _EXPERT_KEYS if is_latent else _MIXTRAL_KEYS
    found = _renamed(experts, required, _OPTIONAL_EXPERT_KEYS if is_latent else {})
    for key in required:
        experts.count(key, least=0 if key in _MAY_BE_ZERO else 1)
    for key in _ALWAYS_ONE:
        experts.count(key, 1, most=1)
    if not is_latent and "expert_hidden_dim" in experts:
        found["intermediate_size"] = experts.count("expert_hidden_dim")
    _refuse_unknown(experts, _IGNORED_OF_EXPERTS)
    return found


def _quantization(settings: Settings) -> dict[str, Any]:
    """Return quantization_config: FP8 with a scale per matrix, or settings in the form of compressed-tensors."""
    given = settings.object("quantization")
    if "quant_method" in given:
        return dict(given)
    if not given:
        return {}
    with _inside("quantization"):
        own = Settings(given)
        own.choice("qformat_weight", ("fp8_e4m3",), "(none)")
        is_static = own.choice("qscheme_act", ("TENSOR", "NO_SCALES"), "TENSOR") == "TENSOR"
        _refuse_unknown(own)
    return {"quant_method": "fp8", "activation_scheme": "static" if is_static else "dynamic"}


def _has_tower(settings: Settings) -> bool:
    """Return whether the model has an image encoder. Raises SpecError for other encoders."""
    vision, parts = settings.object("vision_encoder"), Settings(settings.object("multimodal"))
    with _inside("multimodal"):
        vision = parts.object("vision_encoder_args") or vision
        _refuse_unknown(parts)
    return bool(vision)


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """Put the name of an object before the keys in errors."""
    try:
        yield
    except KeyError as error:
        raise SpecError(f"{name}.{error.args[0]} is missing") from None
    except SpecError as error:
        raise SpecError(f"{name}.{error}") from None


def _refuse_unknown(settings: Settings, ignored: tuple[str, ...] = ()) -> None:
    """Raise SpecError for a setting that no code has read, unless its value changes nothing."""
    for name, found in settings.unread_effects().items():
        if name not in ignored:
            raise SpecError(f"{name:.60} {found!r:.60} is not supported, and may change the results")
