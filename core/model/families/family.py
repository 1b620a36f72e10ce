"""Description of a model family, and readers of the settings that families share.

A family reads the settings of its config.json into fields of ModelConfig, and lists the tensors that its files store
under other names than Llama's or in other shapes. docs/EXTENDING.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from core.model.rope_settings import context_of, read_rope
from core.model.settings import Settings
from core.model.shape import Activation, ExpertsConfig, LayerConfig, RopeConfig
from core.types.errors import SpecError

# Limits far beyond published models; larger sizes would only fill memory.
_MOST_LAYERS = 4096
_MOST_HEADS = _MOST_HEAD_DIM = 1 << 16
_MOST_DIGITS = 6  # of the index of a layer
_MOST_EXPERTS = 4096
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
# Older names of kinds of layers.
_OLDER = {"attention": FULL, "mamba": LINEAR}

# Arguments of ModelConfig.
Fields = dict[str, Any]

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation("silu"),
    "swish": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_pytorch_tanh": Activation("gelu_pytorch_tanh"),
    "gelu_new": Activation("gelu_pytorch_tanh"),
    "gelu_fast": Activation("gelu_pytorch_tanh"),
}


@dataclass(frozen=True)
class Stored:
    """Tensors that a family's files store under other names or in other shapes than the model reads them.

    Names are without `.weight` and `.bias`. pattern: regular expression for the end of the stored name. name: template
    of the model's name, in which {} stands for a part, and {e} for an expert's number.
    """

    pattern: str
    name: str
    # Matrices that the stored one fuses, in the order of its rows.
    parts: tuple[str, ...] = ()
    # halves: parts of equal size. qkv: heads of queries, keys and values. pairs: rows of two parts alternate. rotary:
    # one part, in whose heads the features of a rotary pair are adjacent.
    split: Literal["halves", "qkv", "pairs", "rotary"] = "halves"
    # Matrices of all experts in one tensor: (E, I, O) if transposed or if only that fits their sizes, else (E, O, I).
    has_experts: bool = False
    is_transposed: bool = False
    # Models that the rule is for: those with experts (sparse), those without (dense), or both.
    of: Literal["sparse", "dense", "both"] = "both"


@dataclass(frozen=True)
class Family:
    """Model family: how its config.json is read, and how its files name tensors."""

    architecture: str  # in `architectures`
    model_types: tuple[str, ...]  # values of `model_type` where the model is the text part of a larger one
    read: Callable[[Settings], Fields]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values that transformers assumes for missing keys
    stored: tuple[Stored, ...] = ()


def stacked_experts(
    block: str = r"mlp\.experts",
    *,
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
    split: Literal["halves", "pairs"] = "halves",
    is_transposed: bool = False,
) -> tuple[Stored, Stored]:
    """Return the rules for experts stored in two tensors: one of gate and up, one of down.

    block: pattern of the name before theirs. names: names of the two tensors. split, is_transposed: see Stored.
    """
    gate_up, down = (rf"{block}\.{name}" for name in names)
    shape: dict[str, Any] = {"has_experts": True, "is_transposed": is_transposed}
    return (
        Stored(gate_up, "mlp.experts.{e}.{}", ("gate_proj", "up_proj"), split, **shape),
        Stored(down, "mlp.experts.{e}.down_proj", **shape),
    )


def common(settings: Settings, *, head_dim: int | None = None) -> Fields:
    """Read the settings that all families have. All layers get full attention and a dense MLP; families replace them.

    head_dim: default where the file has none; None: hidden_size / num_attention_heads.
    """
    hidden_size, num_q_heads = settings.count("hidden_size"), settings.count("num_attention_heads", most=_MOST_HEADS)
    dim = settings.count("head_dim", head_dim or max(1, hidden_size // num_q_heads), most=_MOST_HEAD_DIM)
    num_layers = settings.count("num_hidden_layers", most=_MOST_LAYERS)
    num_kv_heads = settings.count("num_key_value_heads", num_q_heads)
    layer = LayerConfig(num_kv_heads=num_kv_heads, head_dim=dim, intermediate_size=settings.count("intermediate_size"))
    has_bias = settings.switch("attention_bias")
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": dim,
        "vocab_size": settings.count("vocab_size"),
        "max_position": settings.count("max_position_embeddings"),
        "rms_norm_eps": settings.real("rms_norm_eps", 1e-6),
        "tie_embeddings": settings.switch("tie_word_embeddings"),
        "layers": (layer,) * num_layers,
        "has_qkv_bias": has_bias,
        "has_output_bias": has_bias,
        "has_mlp_bias": settings.switch("mlp_bias"),
        "activation": activation(settings, "hidden_act", "silu"),
        "num_further_layers": settings.count("num_nextn_predict_layers", 0, least=0),
    }


def with_rope(
    settings: Settings,
    fields: Fields,
    *,
    is_interleaved: bool = False,
    rotated: int | None = None,
    can_be_partial: bool = False,
) -> Fields:
    """Add the one rotation that all layers share; see read_rope."""
    rope = read_rope(
        settings,
        head_dim=fields["head_dim"],
        rotated=rotated,
        can_be_partial=can_be_partial,
        is_interleaved=is_interleaved,
    )
    return fields | {"ropes": (rope,), "max_context": context_of(rope)}


def with_default_rope(settings: Settings, parameters: Mapping[str, Any]) -> Settings:
    """Return the settings, with these rotary parameters added if they have none."""
    has_own = settings.object("rope_parameters") or settings.object("rope_scaling")
    return settings if has_own else settings.replaced(rope_parameters=dict(parameters))


def with_ropes(fields: Fields, ropes: Mapping[str, RopeConfig], kinds: Sequence[str]) -> Fields:
    """Add a rotation for each kind of layer. kinds: kind of each layer."""
    shared = {"ropes": tuple(ropes.values()), "max_context": max(context_of(rope) for rope in ropes.values())}
    return with_layers(fields | shared, rope=[list(ropes).index(kind) for kind in kinds])


def with_layers(fields: Fields, **by_layer: Sequence[Any]) -> Fields:
    """Set fields of LayerConfig, each to a value per layer."""
    rows = zip(fields["layers"], *by_layer.values(), strict=True)
    return fields | {"layers": tuple(replace(layer, **dict(zip(by_layer, row, strict=True))) for layer, *row in rows)}


def activation(settings: Settings, key: str, default: str) -> Activation:
    """Read the activation of the MLPs. Raises SpecError."""
    return _ACTIVATIONS[settings.choice(key, tuple(_ACTIVATIONS), default)]


def layer_kinds(
    settings: Settings,
    num_layers: int,
    default: Callable[[int], str],
    kinds: Sequence[str] = (FULL, SLIDING),
    *,
    key: str = "layer_types",
) -> list[str]:
    """Return the kind of each layer: the setting's, or the default of its index. Raises SpecError for unknown kinds."""
    older = {name: kind for name, kind in _OLDER.items() if kind in kinds}
    listed = settings.per_layer(key, num_layers, (*kinds, *older)) or [default(index) for index in range(num_layers)]
    return [older.get(kind, kind) for kind in listed]


def with_windows(settings: Settings, fields: Fields, kinds: Sequence[str]) -> Fields:
    """Add the sliding window to the layers of kind SLIDING. kinds: kind of each layer."""
    window = settings.count("sliding_window") if "sliding_window" in settings and SLIDING in kinds else None
    return with_layers(fields, window=[window if kind == SLIDING else None for kind in kinds])


def with_optional_windows(settings: Settings, fields: Fields, kinds: Sequence[str]) -> Fields:
    """Add the window to the sliding layers, if `use_sliding_window` is set. kinds: kind of each layer."""
    return with_windows(settings, fields, kinds if settings.switch("use_sliding_window") else [FULL] * len(kinds))


def with_overrides(settings: Settings, layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Set the heads of single layers that `per_layer_config` lists by index. Raises SpecError for other overrides."""
    found = list(layers)
    given = Settings(settings.object("per_layer_config"))
    for key in given.unread():
        # transformers pads indices with zeros to one length.
        if not (key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS and int(key) < len(found)):
            raise SpecError(f"per_layer_config: layer {key!r:.60} is not one of the {len(found)} layers")
        own = Settings(given.object(key))
        layer = found[int(key)]
        found[int(key)] = replace(
            layer,
            head_dim=own.count("head_dim", layer.head_dim, most=_MOST_HEAD_DIM),
            num_kv_heads=own.count("num_key_value_heads", layer.num_kv_heads),
        )
        if unknown := list(own.unread()):
            raise SpecError(f"per_layer_config: {unknown[0]} of a single layer is not supported")
    return tuple(found)


def count_experts(
    settings: Settings, key: str, per_token: str = "num_experts_per_tok", default: int | None = None
) -> dict[str, Any]:
    """Read the number of experts, and of those per token, for ExpertsConfig. Raises SpecError."""
    num_experts = settings.count(key, most=_MOST_EXPERTS)
    return {"num_experts": num_experts, "num_per_token": settings.count(per_token, default, most=num_experts)}


def with_experts_everywhere(settings: Settings, fields: Fields, **own: Any) -> Fields:
    """Add experts with normalized weights in every layer. own: further arguments of ExpertsConfig. Raises SpecError."""
    fields["experts"] = ExpertsConfig(
        **count_experts(settings, "num_local_experts"),
        intermediate_size=fields["intermediate_size"],
        normalizes_weights=True,
        **own,
    )
    return with_layers(fields, is_sparse=[True] * fields["num_layers"])
