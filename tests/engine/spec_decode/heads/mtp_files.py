"""Small random DeepSeek-V3 with an MTP layer in the published format, and its reference."""

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
from tests.engine.tiny_models import DEEPSEEK_V3, ROUTED, TINY, random_model, tiny_config

# T tokens, E hidden_size

_NUM_LAYERS = 3
_GLM = ROUTED | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True}


@dataclass(frozen=True)
class Mtp:
    """Model without its MTP layer, and that layer, whose decoder block is transformers'."""

    model: PreTrainedModel
    layer: nn.Module
    tensors: dict[str, Tensor]

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
        both_TE = (normed(embedded_TE, self.tensors["enorm.weight"]), normed(feature_TE, self.tensors["hnorm.weight"]))
        x_1TE = F.linear(torch.cat(both_TE, dim=-1), self.tensors["eh_proj.weight"])[None]
        rotary: Any = self.model.model.rotary_emb
        angles = rotary(x_1TE, torch.arange(len(ids_T))[None])
        found = self.layer(x_1TE, attention_mask=None, position_embeddings=angles)
        return normed((found if isinstance(found, Tensor) else found[0])[0], self.tensors["shared_head.norm.weight"])


def write_mtp(
    directory: Path, *, family: str = "deepseek_v3", config: dict[str, Any] | None = None, **changes: Any
) -> Mtp:
    """Write the model. config: changes of config.json only. changes: of the model's shape."""
    own = DEEPSEEK_V3 if family == "deepseek_v3" else _GLM
    shape = tiny_config(family, **own | changes | {"num_hidden_layers": _NUM_LAYERS + 1})
    model: Any = random_model(shape)
    model.save_pretrained(directory)
    generator = torch.Generator().manual_seed(3)

    def weight(*size: int, std: float = 0.3) -> Tensor:
        return torch.randn(*size, generator=generator) * std

    tensors = {
        "enorm.weight": 1 + weight(HIDDEN),
        "hnorm.weight": 1 + weight(HIDDEN),
        "eh_proj.weight": weight(HIDDEN, 2 * HIDDEN),
        "shared_head.norm.weight": 1 + weight(HIDDEN),
        "shared_head.head.weight": model.get_output_embeddings().weight.detach(),
        "embed_tokens.weight": model.get_input_embeddings().weight.detach(),
    }
    file = directory / "model.safetensors"
    named = {f"model.layers.{_NUM_LAYERS}.{name}": tensor.clone() for name, tensor in tensors.items()}
    save_file(load_file(file) | named, file)
    config_json = json.loads((directory / "config.json").read_text())
    config_json |= {"num_hidden_layers": _NUM_LAYERS, "num_nextn_predict_layers": 1} | (config or {})
    (directory / "config.json").write_text(json.dumps(config_json))
    layer = model.model.layers[_NUM_LAYERS]
    model.model.layers = model.model.layers[:_NUM_LAYERS]
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = _NUM_LAYERS
    assert TINY["num_hidden_layers"] == _NUM_LAYERS
    return Mtp(model, layer, tensors)
