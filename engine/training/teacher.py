"""The model that heads are trained for: it only computes, and is not trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.model import config as model_config
from core.types.errors import SpecError
from engine.attention.rotary import Rotary
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.kv.pool import KVPool
from engine.layers.shards import ShardReader
from engine.model.aux_hidden_states import AuxHiddenStates
from engine.model.transformer import Transformer
from engine.runner.parallel import TensorParallel
from engine.weights.open_checkpoint import open_checkpoint

# T tokens, E hidden_size, V vocabulary, I input features, O output features, F half of a head's rotated part

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class HiddenStates:
    """What the model has computed of one text's tokens."""

    fused_TE3: Tensor  # (T, 3 E) hidden states after 2, half, and all but 3 of the layers, side by side
    last_TE: Tensor  # (T, E) after all of them, normed: what the vocabulary's projection reads

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.fused_TE3, self.last_TE))


class Teacher:
    """A model whose hidden states can be seen, on the CPU, in the dtype that it multiplies fastest."""

    def __init__(self, model_dir: Path) -> None:
        """Raises SpecError for a model that cannot be trained for."""
        self.directory = model_dir
        self.config = config = model_config.load(model_dir)
        if config.latent or config.experts:
            raise SpecError(f"heads for {config.architecture} are not trained here: its layers are not dense")
        self.layers = 2, config.num_layers // 2, config.num_layers - 3
        if len({*self.layers}) < 3 or min(self.layers) < 0:
            raise SpecError(f"a model of {config.num_layers} layers has no three of which EAGLE-3 takes hidden states")
        has_bf16 = torch.cpu._is_avx512_bf16_supported()
        self.dtype = torch.bfloat16 if has_bf16 else torch.float32
        self._layout = EngineConfig(
            model_dir=model_dir, dtype=str(self.dtype).removeprefix("torch."), block_size=_BLOCK_SIZE
        ).layout()
        checkpoint, device = open_checkpoint(model_dir), torch.device("cpu")
        reader = ShardReader(checkpoint, TensorParallel(), self.dtype, device)
        self.rotary = Rotary(config, device)
        with torch.inference_mode():
            self._model = Transformer(config, reader, self._layout, on_read=lambda layer: None)
        self.embedding_VE = reader.tensor("model.embed_tokens.weight")
        self.head_VE = self.embedding_VE if config.tie_embeddings else reader.tensor("lm_head.weight")
        self.norm = reader.norm("model.norm", config.rms_norm_eps)
        self._reader = reader

    def tensor(self, name: str) -> Tensor:
        """One of its weights, by its name in the checkpoint, in `dtype`. Raises SpecError."""
        return self._reader.tensor(name)

    @torch.inference_mode()
    def features(self, texts: Sequence[Sequence[int]]) -> list[HiddenStates]:
        """Of each text, in bf16; all are computed in one step."""
        rows, first = [], 0
        for tokens in texts:
            num_blocks = -(-len(tokens) // _BLOCK_SIZE)
            rows.append(Row(token_ids=tokens, start=0, blocks=range(first, first + num_blocks), num_logits=0))
            first += num_blocks
        pool = KVPool(self._layout, num_blocks=first, device=torch.device("cpu"))
        aux_hidden_states = AuxHiddenStates((*self.layers, self.config.num_layers))
        self._model(Batch.of(rows, block_size=_BLOCK_SIZE), pool, None, aux_hidden_states=aux_hidden_states)
        fused_TE3 = torch.cat([aux_hidden_states[layer] for layer in self.layers], dim=1).bfloat16()
        last_TE = self._model.normed(aux_hidden_states[self.config.num_layers]).bfloat16()
        counts = [len(tokens) for tokens in texts]
        return [
            HiddenStates(fused.clone(), last.clone())
            for fused, last in zip(torch.split(fused_TE3, counts), torch.split(last_TE, counts), strict=True)
        ]
