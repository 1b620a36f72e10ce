"""Small random models with an MTP layer in the published formats, and its reference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.engine.spec_decode.heads.head_files import HIDDEN, Choice, chained, likeliest, normed, states_of
from tests.engine.tiny_models import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DELTA_NET,
    NEMOTRON_H_MOE,
    ROUTED,
    TINY,
    random_model,
    tiny_config,
)

# T tokens, E hidden_size

_NUM_LAYERS = 3
_QWEN = DELTA_NET | {
    "initializer_range": 0.3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
}
# Qwen's names of the tensors.
_QWEN_NAMES = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head.norm": "mtp.norm",
}
# The last two layers are those of the MTP layer.
_NEMOTRON = NEMOTRON_H_MOE | {
    "layers_block_type": ["linear_attention", "full_attention", "moe", "full_attention", "moe"],
    "moe_latent_size": 32,
}
_GLM = ROUTED | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True}
_SHAPES = {"deepseek_v3": DEEPSEEK_V3, "deepseek_v32": DEEPSEEK_V32, "glm4_moe": _GLM, "qwen3_5": _QWEN}
_SHAPES |= {"nemotron_h": _NEMOTRON}


@dataclass(frozen=True)
class Mtp:
    """Model without its MTP layer, and that layer, whose decoder block is transformers'."""

    model: PreTrainedModel
    layers: list[nn.Module]
    tensors: dict[str, Tensor]
    around: float = 0.0  # the norms multiply by this more than their weights
    is_sparse: bool = False  # attention

    @torch.inference_mode()
    def reference(self, tokens: list[int], num_tokens: int, *, choose: Choice = likeliest) -> list[int]:
        """Return the layer's draft after `tokens`: DeepSeek-V3, section 2.2, with the one layer for every place."""
        return chained(
            states_of(self.model, tokens)[-1],  # normed
            self._layer,
            lambda x_E: self.model.get_output_embeddings().weight @ x_E,
            tokens,
            num_tokens,
            choose=choose,
        )

    def _layer(self, ids_T: Tensor, feature_TE: Tensor) -> Tensor:
        embedded_TE = self.model.get_input_embeddings().weight[ids_T]
        both_TE = (self._normed("enorm", embedded_TE), self._normed("hnorm", feature_TE))
        x_1TE = F.linear(torch.cat(both_TE, dim=-1), self.tensors["eh_proj.weight"])[None]
        rotary: Any = getattr(self.model.model, "rotary_emb", lambda *_: None)  # not in Nemotron
        angles = rotary(x_1TE, torch.arange(len(ids_T))[None])
        # Indexers need a mask.
        mask = torch.ones(len(ids_T), len(ids_T), dtype=torch.bool).tril()[None, None] if self.is_sparse else None
        for layer in self.layers:
            found = layer(x_1TE, attention_mask=mask, position_embeddings=angles)
            x_1TE = found if isinstance(found, Tensor) else found[0]
        return self._normed("shared_head.norm", x_1TE[0])

    def _normed(self, name: str, x_TE: Tensor) -> Tensor:
        return normed(x_TE, self.tensors[f"{name}.weight"] + self.around)


def write_mtp(
    directory: Path, *, family: str = "deepseek_v3", config: dict[str, Any] | None = None, **changes: Any
) -> Mtp:
    """Write the model. config: changes of config.json only. changes: of the model's shape."""
    own = _SHAPES[family]
    around = 1.0 if family == "qwen3_5" else 0.0
    num_own = 2 if family == "nemotron_h" else 1
    shape = tiny_config(family, **own | changes | {"num_hidden_layers": _NUM_LAYERS + num_own})
    model: Any = random_model(shape)
    model.save_pretrained(directory)
    generator = torch.Generator().manual_seed(3)

    def weight(*size: int, std: float = 0.3) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    tensors = {
        "enorm.weight": 1 - around + weight(HIDDEN),
        "hnorm.weight": 1 - around + weight(HIDDEN),
        "eh_proj.weight": weight(HIDDEN, 2 * HIDDEN),
        "shared_head.norm.weight": 1 - around + weight(HIDDEN),
        "shared_head.head.weight": model.get_output_embeddings().weight.detach(),
        "embed_tokens.weight": model.get_input_embeddings().weight.detach(),
    }
    file = directory / "model.safetensors"
    named = {f"model.layers.{_NUM_LAYERS}.{name}": tensor.clone() for name, tensor in tensors.items()}
    named |= load_file(file)
    save_file(_RENAMED.get(family, dict)(named), file)
    config_json = json.loads((directory / "config.json").read_text())
    config_json |= {"num_hidden_layers": _NUM_LAYERS, "num_nextn_predict_layers": 1} | (config or {})
    if family == "nemotron_h":
        kinds = shape.layer_types
        config_json |= {"layers_block_type": kinds[:_NUM_LAYERS], "mtp_layers_block_type": kinds[_NUM_LAYERS:]}
    (directory / "config.json").write_text(json.dumps(config_json))
    layers = [*model.model.layers[_NUM_LAYERS:]]
    model.model.layers = model.model.layers[:_NUM_LAYERS]
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = _NUM_LAYERS
    assert TINY["num_hidden_layers"] == _NUM_LAYERS
    return Mtp(model, layers, tensors, around, is_sparse=family == "deepseek_v32")


def _as_qwen(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the layer's tensors as Qwen does. Qwen stores no copies of the embedding and the head."""
    prefix, named = f"model.layers.{_NUM_LAYERS}.", dict[str, Tensor]()
    for name, tensor in tensors.items():
        stem = name.removeprefix(prefix).removesuffix(".weight")
        if not name.startswith(prefix):
            named[name] = tensor
        elif stem in _QWEN_NAMES:
            named[f"{_QWEN_NAMES[stem]}.weight"] = tensor
        elif stem not in ("shared_head.head", "embed_tokens"):
            named[f"mtp.layers.0.{name.removeprefix(prefix)}"] = tensor
    return named


def _as_nemotron(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the layers' tensors as Nemotron does, which stores no copies either."""
    prefix, named = f"model.layers.{_NUM_LAYERS}.", dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name == f"{prefix}shared_head.norm.weight":
            name = "mtp.layers.1.final_layernorm.weight"
        elif name.startswith((f"{prefix}shared_head", f"{prefix}embed_tokens")):
            continue
        name = name.replace(prefix, "mtp.layers.0.").replace(f"model.layers.{_NUM_LAYERS + 1}.", "mtp.layers.1.")
        named[name] = tensor
    return named


_RENAMED = {"qwen3_5": _as_qwen, "nemotron_h": _as_nemotron}
