"""An EAGLE-3 head as it learns from a model, and as it is published. Li et al. 2025, arXiv:2503.01840, section 3."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.training.batches import TextBatch
from engine.training.eagle_head import EagleHead, Rotation
from engine.training.teacher import Teacher
from engine.training.vocabulary import DraftVocabulary

# B texts, T tokens of the longest, E hidden_size, N answer tokens, K steps, V draft vocabulary

_STEPS = 5  # of a chain, at most
_TRAINED = 3  # of these: further ones are much like the last, and take as long to train as the first
_NOISE = 0.1
_DECAY = 0.8  # of the loss from step to step
_KEPT = (  # of the model's config.json
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters"),
    *("bos_token_id", "eos_token_id"),
)


class EagleLearner:
    """Implements Learner."""

    def __init__(self, teacher: Teacher, vocabulary: DraftVocabulary, *, seed: int) -> None:
        self._teacher = teacher
        self._vocabulary = vocabulary
        self._head_VE = teacher.head_VE[vocabulary.ids_V]
        self._draft_ids = vocabulary.draft_ids
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._head = EagleHead(teacher.config, draft_vocab_size=len(vocabulary.ids_V))
        self._begin()

    @property
    def module(self) -> nn.Module:
        return self._head

    def loss(self, batch: TextBatch, *, number: int) -> Tensor:
        """Of each step the cross-entropy between the model's next tokens and the head's, over the draft vocabulary,
        where the model's likeliest is in it; together, weighed by 0.8 to the power of the step."""
        with torch.no_grad():
            last_NE = batch.last_BTE[batch.row_N, batch.place_N].to(self._head_VE.dtype)
            wanted_NV = F.linear(last_NE, self._head_VE).float().softmax(-1)
            is_known_N = self._draft_ids[batch.next_N] >= 0
        first = max(0, int(batch.place_N.min()) - _TRAINED)
        total, weights = torch.zeros(()), 0.0
        for step, a_BTE in enumerate(self._chains(batch, first, _TRAINED)):
            begin_N = batch.place_N - step
            logits_NV = self._head.logits(a_BTE[batch.row_N, (begin_N - first).clamp_min(0)]).float()
            counts_N = (is_known_N & (begin_N >= first)).float()
            losses_N = F.cross_entropy(logits_NV, wanted_NV, reduction="none")
            weight = _DECAY**step
            total = total + weight * (losses_N * counts_N).sum() / counts_N.sum().clamp_min(1.0)
            weights += weight
        return total / weights

    @torch.no_grad()
    def guesses(self, batch: TextBatch) -> Tensor:
        found = torch.full((len(batch.place_N), _STEPS), -1)
        first = int(batch.place_N.min())
        for step, a_BTE in enumerate(self._chains(batch, first, _STEPS)):
            logits_NV = self._head.logits(a_BTE[batch.row_N, batch.place_N - first])
            found[:, step] = self._vocabulary.ids_V[logits_NV.argmax(-1)]
        return found

    def published(self) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """As yuhuili's EAGLE3 checkpoints: embeddings are the model's."""
        raw = json.loads((self._teacher.directory / "config.json").read_text())
        ids_V, config = self._vocabulary.ids_V, self._teacher.config
        tree = {key: raw[key] for key in _KEPT if key in raw} | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "head_dim": config.head_dim,
            "draft_vocab_size": len(ids_V),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        tensors = {name: tensor.detach().bfloat16() for name, tensor in self._head.state_dict().items()}
        tensors["d2t"] = ids_V - torch.arange(len(ids_V))
        tensors["t2d"] = self._draft_ids >= 0
        return tree, tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        own = self._head.state_dict()
        self._head.load_state_dict({name: tensors[name] for name in own})

    def _chains(self, batch: TextBatch, first: int, num_steps: int) -> Iterator[Tensor]:
        """Of each step what it knows (B, T - first, E), of the chains that begin at slot `first` and on."""
        embedded_BTE = F.embedding(batch.tokens_BT, self._teacher.embedding_VE)
        slots_T = torch.arange(batch.tokens_BT.shape[1])
        g_BTE, chain = self._head.fuse(batch.fused_BTE3.to(self._teacher.dtype)), None
        for step in range(num_steps):
            begin = first if step else 0
            rotation: Rotation = self._teacher.rotary(slots_T[begin:] + step, torch.float32)
            embedded = _from(embedded_BTE, step)[:, begin:]
            g_BTE, chain = self._head.step(g_BTE, embedded, rotation, chain, first=first - begin)
            yield g_BTE

    @torch.no_grad()
    def _begin(self) -> None:
        """Near the model: the highest of the hidden states goes through what was its last layer, and to its own head.
        What it says then is of the token that is known already; how that one leads to the next is learnt. Beginning
        with random layers takes several times as many steps to as much."""
        teacher, head = self._teacher, self._head
        hidden, layer = teacher.config.hidden_size, head.midlayer
        head.fc.weight.mul_(_NOISE)
        head.fc.weight[:, 2 * hidden :] += torch.eye(hidden)
        last = f"model.layers.{teacher.config.num_layers - 1}"
        for name in ("q_proj", "k_proj", "v_proj"):
            layer.get_parameter(f"self_attn.{name}.weight")[:, hidden:] = teacher.tensor(
                f"{last}.self_attn.{name}.weight"
            )
        layer.hidden_norm.weight.copy_(teacher.tensor(f"{last}.input_layernorm.weight"))
        for name in ("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            layer.get_parameter(f"{name}.weight").copy_(teacher.tensor(f"{last}.{name}.weight"))
        head.norm.weight.copy_(teacher.norm.weight)
        head.lm_head.weight.copy_(self._head_VE)


def _from(x_BTE: Tensor, step: int) -> Tensor:
    """Each slot's row is that of so many slots later; 0 beyond the last."""
    return F.pad(x_BTE[:, step:], (0, 0, 0, step))
