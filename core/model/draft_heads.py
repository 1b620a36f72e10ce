"""Configuration of draft heads: Medusa, EAGLE-1, EAGLE-3 and MTP. Reads config.json and, for EAGLE-1, a tensor's shape.

EAGLE-3 comes in two layouts. EAGLE's own repository and SpecForge write a Llama's config.json and tensors named
`midlayer.*`. `speculators` writes `speculators_model_type`, the layer under `transformer_layer_config`, and tensors
named `layers.0.*`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from core.model import config as model_config
from core.model.settings import read_object
from core.model.shape import ModelConfig
from core.model.weight_files import locate_tensors, weight_files
from core.types.errors import SpecError

HeadsKind = Literal["medusa", "eagle", "mtp"]

# Features are kept for this many steps of max_running rows, for the positions where sequences may continue.
STEPS_KEPT = 4
_FURTHER = "num_nextn_predict_layers"
_WITH_FURTHER_LAYERS = (
    *("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
    *("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM"),
    *("NemotronHForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
)
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_VARIANT_FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
_MOST = 64  # heads of Medusa and residual blocks of each; also the longest draft


class HeadsPlace(NamedTuple):
    """Kind and directory of draft heads."""

    kind: HeadsKind
    directory: Path  # mtp: the model's directory


@dataclass(frozen=True, kw_only=True)
class Eagle3Variant:
    """Differences between EAGLE-3 heads, named as in the config.json of `speculators`."""

    layer: str = "midlayer"  # prefix of its tensors
    norm_before_fc: bool = False  # norm over the concatenation of the three hidden states
    fc_norm: bool = False  # norm of each hidden state
    norm_before_residual: bool = False
    norm_output: bool = False  # the next feature is the layer's output after the final norm


@dataclass(frozen=True, kw_only=True)
class HeadsConfig:
    """Configuration of the draft heads of one model."""

    kind: HeadsKind
    directory: Path  # mtp: the model's directory
    fingerprint: str
    layers: tuple[int, ...]  # hidden states it reads: those after this many layers of the model
    num_kv_layers: int = 0  # its own layers in the KV pool, after the model's
    keeps_features: bool = False  # whether each KV block has a feature of its last position
    num_heads: int = 0  # medusa: head i predicts the token i + 1 positions after the next
    num_residuals: int = 0  # medusa: residual blocks before each head's projection
    shape: ModelConfig | None = None  # eagle, mtp: shape of its layer
    draft_vocab_size: int = 0  # EAGLE-3: size of its own vocabulary
    eagle3: Eagle3Variant | None = None

    @property
    def kv_layers(self) -> tuple[tuple[int, int], ...]:
        """KV heads, and numbers per row, of the draft heads' layers in the KV pool; see ModelConfig.kv_layers."""
        return self.shape.kv_layers[-self.num_kv_layers :] if self.shape and self.num_kv_layers else ()

    def check_tensor_parallel(self, size: int) -> None:
        """Raise SpecError unless the heads can run on `size` ranks. Heads without KV run on rank 0 and always can."""
        if size == 1 or not self.num_kv_layers:
            return
        try:
            assert self.shape
            self.shape.check_tensor_parallel(size)
        except SpecError as error:
            raise SpecError(f"speculation.model: {self.directory}: {error}") from None

    def feature_bytes(self, model: ModelConfig, *, itemsize: int) -> int:
        """Return the bytes of features per block. itemsize: of the model's activations."""
        return model.hidden_size * itemsize if self.keeps_features else 0

    def bytes_beside_blocks(self, model: ModelConfig, *, itemsize: int, max_running: int, spare_bytes: int) -> int:
        """Return the memory per rank in addition to the pool: features for max_running rows, and one spare block per
        row for the heads' own layers. spare_bytes: bytes of one block of these layers."""
        return max_running * (STEPS_KEPT * model.hidden_size * itemsize + spare_bytes)


def load_heads(kind: HeadsKind, directory: Path, model: ModelConfig) -> HeadsConfig:
    """Read the config.json of a directory of heads (for `mtp`, the model's own).

    Raises SpecError if they are not heads of this kind, or do not fit the model.
    """
    raw = read_object(directory / "config.json")
    try:
        return _READERS[kind](directory, raw, model)
    except KeyError as error:
        raise SpecError(f"{directory / 'config.json'}: {error.args[0]} is missing: are these {kind} heads?") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise SpecError(f"{directory / 'config.json'}: {error}") from error


def _medusa(directory: Path, raw: Mapping[str, Any], model: ModelConfig) -> HeadsConfig:
    hidden_size = raw.get("hidden_size", model.hidden_size)
    _check_same(directory, "hidden_size", hidden_size, model.hidden_size)
    return HeadsConfig(
        kind="medusa",
        directory=directory,
        fingerprint=model_config.fingerprint(directory),
        layers=(model.num_layers,),
        num_heads=_count(raw["medusa_num_heads"], "medusa_num_heads", least=1),
        num_residuals=_count(raw.get("medusa_num_layers", 1), "medusa_num_layers", least=0),
    )


def _eagle(directory: Path, raw: Mapping[str, Any], model: ModelConfig) -> HeadsConfig:
    """Read EAGLE-3 heads (Li et al. 2025, arXiv:2503.01840) or EAGLE-1 heads (Li et al. 2024, arXiv:2401.15077).

    EAGLE-1 often has a plain Llama's config.json; only its weights tell it from a model.
    """
    if model.latent:
        raise SpecError(f"{directory}: EAGLE heads need keys and values, but {model.architecture} caches latents")
    architecture = str((raw.get("architectures") or ["(none)"])[0])
    variant, layer = None, raw
    if "speculators_model_type" in raw:
        variant, layer = _speculators_variant(directory, raw), raw["transformer_layer_config"]
    elif "Eagle3" in architecture:
        variant = Eagle3Variant(fc_norm=bool(raw.get("fc_norm", False)))
        if not raw.get("norm_output", True):
            raise SpecError(f"{directory}: norm_output: false is not supported in SpecForge's layout; supported: true")
    elif not is_eagle1(directory):
        raise SpecError(
            f"{directory}: architecture {architecture} is not EAGLE-3; expected LlamaForCausalLMEagle3, or the weights "
            "of EAGLE-1, whose fc.weight is (hidden_size, 2 * hidden_size)"
        )
    shape = model_config.parse(layer, directory / "config.json", architecture="LlamaForCausalLM")
    if shape.num_layers != 1:
        raise SpecError(f"{directory}: EAGLE heads of {shape.num_layers} layers are not supported; supported: 1")
    if not shape.can_keep_kv("int4"):
        raise SpecError(f"{directory}: head_dim is {shape.head_dim}, and must be a multiple of 4")
    for name in ("hidden_size", "vocab_size"):
        _check_same(directory, name, getattr(shape, name), getattr(model, name))
    _check_same(directory, "target_hidden_size", raw.get("target_hidden_size") or shape.hidden_size, model.hidden_size)
    draft_vocab_size = raw.get("draft_vocab_size") or model.vocab_size
    if type(draft_vocab_size) is not int or not 1 <= draft_vocab_size <= model.vocab_size:
        raise ValueError(f"draft_vocab_size is {draft_vocab_size!r}, and must be from 1 to {model.vocab_size}")
    return HeadsConfig(
        kind="eagle",
        directory=directory,
        fingerprint=model_config.fingerprint(directory),
        layers=_aux_layers(directory, raw, model) if variant else (model.num_layers,),
        num_kv_layers=1,
        keeps_features=True,
        shape=replace(shape, layers=(replace(shape.layers[0], window=None),)),
        draft_vocab_size=draft_vocab_size if variant else 0,
        eagle3=variant,
    )


def _speculators_variant(directory: Path, raw: Mapping[str, Any]) -> Eagle3Variant:
    """Return the variant of heads in the layout of `speculators`. Raises SpecError if it is not supported."""
    layer = raw["transformer_layer_config"]
    for name, found, supported in (
        ("speculators_model_type", raw["speculators_model_type"], "eagle3"),
        ("transformer_layer_config.model_type", layer.get("model_type", "qwen3"), "llama"),
    ):
        if found != supported:
            raise SpecError(f"{directory}: {name} {found} is not supported; supported: {supported}")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise SpecError(f"{directory}: EAGLE heads with sliding-window attention are not supported")
    flags = {name: bool(raw.get(name, False)) for name in _VARIANT_FLAGS}
    return Eagle3Variant(layer="layers.0", **flags)


def _aux_layers(directory: Path, raw: Mapping[str, Any], model: ModelConfig) -> tuple[int, ...]:
    """Return the number of model layers below each of the three hidden states that the head reads.

    `speculators` counts layers like us. `eagle_config`, as in SpecForge and SGLang, has the zero-based index of the
    layer whose output is read. The default is that of vLLM and SGLang.
    """
    found = raw.get(_AUX_LAYERS)
    if not found and (ids := (raw.get("eagle_config") or {}).get(_AUX_LAYERS)):
        found = [layer + 1 for layer in ids]
    layers = tuple(sorted(found or (2, model.num_layers // 2, model.num_layers - 3)))
    are_numbers = all(type(layer) is int for layer in layers)
    if not are_numbers or len({*layers}) != 3 or not 0 <= layers[0] <= layers[2] <= model.num_layers:
        raise SpecError(
            f"{directory}: the head reads hidden states after layers {layers}; it must be three different ones, from 0 "
            f"to {model.num_layers}"
        )
    return layers


def is_eagle1(directory: Path) -> bool:
    """Return whether the tensors are those of EAGLE-1. Raises SpecError if the directory has none."""
    from safetensors import safe_open

    located, _ = locate_tensors(weight_files(directory))
    if (file := located.get("fc.weight")) is None:
        return False
    with safe_open(file, framework="numpy") as tensors:
        rows, columns = tensors.get_slice("fc.weight").get_shape()
    return bool(columns == 2 * rows)


def _mtp(directory: Path, raw: Mapping[str, Any], model: ModelConfig) -> HeadsConfig:
    """Read the MTP layer after the model's last one. DeepSeek-V3, arXiv:2412.19437, section 2.2."""
    if model.architecture not in _WITH_FURTHER_LAYERS or not model.num_further_layers:
        raise SpecError(
            f"{directory}: mtp needs {_FURTHER} (Qwen: mtp_num_hidden_layers) in config.json and the architecture "
            f"{' or '.join(_WITH_FURTHER_LAYERS)}; "
            f"this {model.architecture} has none; choose another speculation.method"
        )
    if model.num_further_layers != 1:
        raise SpecError(f"{directory}: {_FURTHER} {model.num_further_layers} is not supported; supported: 1")
    last = next(layer for layer in reversed(model.layers) if layer.has_kv)
    # With sparse attention the MTP layer chooses positions itself: no other layer does in its steps.
    is_indexed = model.latent is not None and model.latent.index is not None
    layers = [replace(last, is_sparse=model.experts is not None and last.has_mlp, has_indexer=is_indexed)]
    if not last.has_mlp:
        layers.append(next(layer for layer in reversed(model.layers) if layer.is_sparse))
    return HeadsConfig(
        kind="mtp",
        directory=directory,
        fingerprint="mtp",  # the layer is part of the weights, which have a fingerprint
        layers=(model.num_layers,),
        num_kv_layers=1,
        keeps_features=True,
        shape=replace(model, num_layers=model.num_layers + len(layers), layers=(*model.layers, *layers)),
    )


_READERS: Mapping[HeadsKind, Callable[[Path, Mapping[str, Any], ModelConfig], HeadsConfig]] = {
    "medusa": _medusa,
    "eagle": _eagle,
    "mtp": _mtp,
}


def _count(found: Any, name: str, *, least: int) -> int:
    if type(found) is not int or not least <= found <= _MOST:
        raise ValueError(f"{name} is {found!r}, and must be a number from {least} to {_MOST}")
    return found


def _check_same(directory: Path, name: str, found: int, expected: int) -> None:
    if found != expected:
        raise SpecError(f"{directory}: {name} is {found}, and the model's is {expected}: use heads made for this model")
