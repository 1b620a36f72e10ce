"""Medusa's heads as they learn from a model's answers, and as they are published. Cai et al. 2024, arXiv:2401.10774:
the model stays as it is ("Medusa-1").

Of the projections only the rows of frequent tokens are trained. The others stay the model's own, and some of them, by
chance, stand beside those in every step, so that what is learnt keeps clear of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.training.batches import TextBatch
from engine.training.medusa_heads import MedusaHeads
from engine.training.teacher import Teacher
from engine.training.vocabulary import DraftVocabulary

# N answer tokens, E hidden_size, K heads, V draft vocabulary, O rows beside it

_HEADS = 4
_BLOCKS = 1
_DECAY = 0.8  # of the loss from head to head: section 2.2.1
_OTHERS = 1024  # rows


class MedusaLearner:
    """Implements Learner."""

    def __init__(self, teacher: Teacher, vocabulary: DraftVocabulary, *, seed: int) -> None:
        self._teacher = teacher
        self._vocabulary = vocabulary
        self._seed = seed
        self._draft_ids = vocabulary.draft_ids
        self._others = torch.nonzero(self._draft_ids < 0).squeeze(1)
        self._heads = MedusaHeads(teacher.head_VE[vocabulary.ids_V], num_heads=_HEADS, num_blocks=_BLOCKS)

    @property
    def module(self) -> nn.Module:
        return self._heads

    def loss(self, batch: TextBatch, *, number: int) -> Tensor:
        """Of each head its cross-entropy with the answer's token; together, weighed by 0.8 to the power of the head."""
        drawn = torch.Generator().manual_seed((self._seed << 32) + number)
        others_O = self._others[torch.randperm(len(self._others), generator=drawn)[:_OTHERS]]
        others_OE = self._teacher.head_VE[others_O]
        draft_N = self._draft_ids[batch.next_N]
        total, weights = torch.zeros(()), 0.0
        for head in range(_HEADS):
            chosen_N = (draft_N >= 0) & (batch.place_N > head)
            last_NE = batch.last_BTE[batch.row_N[chosen_N], batch.place_N[chosen_N] - 1 - head]
            x_NE = self._heads.hidden(head, last_NE)
            logits_NV = F.linear(x_NE, self._heads.projection(head))
            logits_NO = F.linear(x_NE, others_OE.to(x_NE.dtype)).to(logits_NV.dtype)
            weight = _DECAY**head
            total = total + weight * F.cross_entropy(torch.cat((logits_NV, logits_NO), 1).float(), draft_N[chosen_N])
            weights += weight
        return total / weights

    @torch.no_grad()
    def guesses(self, batch: TextBatch) -> Tensor:
        place_N = (batch.place_N - 1).clamp_min(0)
        last_NE = batch.last_BTE[batch.row_N, place_N]
        found = []
        for head in range(_HEADS):
            x_NE = self._heads.hidden(head, last_NE).to(self._teacher.dtype)
            found.append(F.linear(x_NE, self._projection(head).to(x_NE.dtype)).argmax(-1))
        return torch.stack(found, dim=1)

    def published(self) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """As FasterDecoding's checkpoints: every head with all of a projection."""
        config = self._teacher.config
        tree = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_heads": _HEADS,
            "medusa_num_layers": _BLOCKS,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "torch_dtype": "bfloat16",
        }
        tensors = {name: tensor.detach().bfloat16() for name, tensor in self._heads.state_dict().items()}
        for head in range(_HEADS):
            tensors[f"{head}.{_BLOCKS}.weight"] = self._projection(head).bfloat16()
        return tree, tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        own = dict(tensors)
        for head in range(_HEADS):
            own[f"{head}.{_BLOCKS}.weight"] = tensors[f"{head}.{_BLOCKS}.weight"][self._vocabulary.ids_V]
        self._heads.load_state_dict(own)

    @torch.no_grad()
    def _projection(self, head: int) -> Tensor:
        """All of it: (the model's vocabulary, E)."""
        whole = self._teacher.head_VE.clone()
        whole[self._vocabulary.ids_V] = self._heads.projection(head).to(whole.dtype)
        return whole
