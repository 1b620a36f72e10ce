"""Medusa's heads in plain torch: their definition, as they are trained. Cai et al. 2024, arXiv:2401.10774, section 2.

With h_p, what the model has computed of position p (normed), its own projection says which token follows at p + 1. Head
i = 0, 1, … says which one is at p + 2 + i:

    logits_i = projection_i(r(h_p)),        r(x) = x + silu(linear(x)), one or several of them

It begins as the model's own head: linear is 0, and the projection the model's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# N positions, E hidden_size, V rows of the projection


class MedusaHeads(nn.Module):
    """The modules' names are those of published checkpoints: `{head}.{block}.linear`, `{head}.{num_blocks}`."""

    def __init__(self, projection_VE: Tensor, *, num_heads: int, num_blocks: int) -> None:
        """projection: the model's, or some of its rows."""
        super().__init__()
        self._num_heads = num_heads
        vocab_size, hidden = projection_VE.shape
        for head in range(num_heads):
            projection = nn.Linear(hidden, vocab_size, bias=False)
            with torch.no_grad():
                projection.weight.copy_(projection_VE)
            self.add_module(str(head), nn.Sequential(*(_Block(hidden) for _ in range(num_blocks)), projection))

    def hidden(self, head: int, last_NE: Tensor) -> Tensor:
        """What a head's projection reads: (N, E)."""
        x: Tensor = self.get_submodule(str(head))[:-1](last_NE.float())  # type: ignore[index]
        return x

    def projection(self, head: int) -> Tensor:
        """(V, E)"""
        weight: Tensor = self.get_submodule(str(head))[-1].weight  # type: ignore[index]
        return weight


class _Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x)).float()
